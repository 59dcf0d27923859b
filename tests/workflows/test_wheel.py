"""What is installed from a wheel is whole: kernels, data, templates, and a report from it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from loka_toolkit.artifacts.safety_map import Verdict

ROOT = Path(__file__).resolve().parents[2]


def test_a_wheel_holds_every_room_and_writes_a_report(make_map, tmp_path):
    build = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    built = subprocess.run([sys.executable, *build], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "loka_toolkit"
    sources = {
        f"loka_toolkit/{file.relative_to(package).as_posix()}"
        for folder in (package, package / "kernels", package / "datasets")
        for file in folder.rglob("*.py")
    }
    templates = {
        f"loka_toolkit/reporting/templates/{file.name}"
        for file in (ROOT / "reports" / "templates").iterdir()
    }
    assert len(templates) > 2
    assert (sources | templates | {"loka_toolkit/py.typed"}) <= names

    site = tmp_path / "site"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([sys.executable, *install, str(wheel)], check=True)
    safety = make_map({("a#0:fwd", "e4m3/rowwise/fast"): Verdict.SAFE}).save(tmp_path / "s.parquet")
    written = subprocess.run(
        [sys.executable, "-m", "loka_toolkit.cli", "report", str(safety), "-o", "r.html", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
    )
    assert written.returncode == 0, written.stderr
    assert "a#0:fwd" in (tmp_path / "r.html").read_text(encoding="utf-8")
