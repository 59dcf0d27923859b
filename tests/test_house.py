"""The house itself: rooms, lean imports, no pickles, lengths of files, the published schema."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from loka_toolkit.artifacts.dispatch_table import json_schema

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "loka_toolkit"

EVERYONE = {"artifacts", "numerics", "errors", "environment", "_version"}
ALLOWED = {
    "artifacts": EVERYONE,
    "numerics": EVERYONE,
    "kernels": EVERYONE,
    "datasets": EVERYONE,
    "recording": EVERYONE | {"kernels"},
    "analysis": EVERYONE,
    "reporting": EVERYONE,
    "harness": EVERYONE | {"kernels"},
    "mods": EVERYONE | {"kernels"},
    "dispatch": EVERYONE | {"kernels"},
    "monitoring": EVERYONE | {"recording", "dispatch"},
}
"""What each room may import besides itself; ``workflows``, ``cli`` and the root see everything."""

HEAVY = ("pymc", "pandas", "matplotlib", "jinja2", "nutpie", "arviz", "pytensor", "numba", "triton")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which room is meant"
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "loka_toolkit" and len(parts) > 1:
                found.add(parts[1])
    return {
        name for name in found if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()
    }


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_room_imports_only_what_the_rule_allows(room):
    files = sorted((PACKAGE / room).rglob("*.py"))
    if not files:
        pytest.skip(f"the room {room} is not built yet")
    for file in files:
        odd = imported_rooms(file) - ALLOWED[room] - {room}
        assert not odd, f"{file.relative_to(ROOT)} imports {sorted(odd)}"


def test_every_room_has_a_rule():
    rooms = {p.name for p in PACKAGE.iterdir() if p.is_dir() and not p.name.startswith("__")}
    assert rooms - set(ALLOWED) == {"workflows"}


def run_blocked(blocked: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    prelude = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {blocked!r}:\n"
        "            raise ModuleNotFoundError(f'{name} is blocked', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    return subprocess.run(
        [sys.executable, "-c", prelude + code], capture_output=True, text=True, cwd=ROOT
    )


@pytest.mark.parametrize(
    ("blocked", "code"),
    [
        ((*HEAVY, "pyarrow"), "import loka_toolkit.dispatch"),
        (HEAVY, "import loka_toolkit.recording, loka_toolkit.dispatch, loka_toolkit.cli"),
        ((*HEAVY, "pyarrow"), "import loka_toolkit; assert 'record' in dir(loka_toolkit)"),
    ],
)
def test_lean_imports(blocked, code):
    result = run_blocked(blocked, code)
    assert result.returncode == 0, result.stderr


def test_import_of_the_package_is_light():
    code = "import loka_toolkit, sys; print('torch' in sys.modules, 'pyarrow' in sys.modules)"
    result = run_blocked((), code)
    assert result.stdout.split() == ["False", "False"]


SOURCES = sorted(
    file
    for folder in (PACKAGE, ROOT / "kernels", ROOT / "datasets")
    for file in folder.rglob("*.py")
)


def loads_unsafely(call: ast.Call) -> bool:
    """Whether a call may execute what it reads: ``torch.load`` and ``numpy.load`` of objects."""
    if ast.unparse(call.func) not in ("torch.load", "np.load", "numpy.load"):
        return False
    said = {k.arg: ast.unparse(k.value) for k in call.keywords}
    if ast.unparse(call.func) == "torch.load":
        return said.get("weights_only") != "True"
    return said.get("allow_pickle", "False") != "False"


def reads_pickles(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] + [getattr(node, "module", "") or ""]
            roots = {name.partition(".")[0] for name in names}
            if {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve"} & roots:
                return True
        elif isinstance(node, ast.Call) and loads_unsafely(node):
            return True
    return False


def test_nothing_read_from_disk_may_execute():
    assert reads_pickles("import torch\ntorch.load(path)")
    assert reads_pickles("from pickle import loads")
    assert not reads_pickles("import torch\ntorch.load(path, weights_only=True)")
    assert len(SOURCES) > 100
    assert [file for file in SOURCES if reads_pickles(file.read_text())] == []


LONGEST_FILE = 430
"""Lines: about 400. A longer file says more than one thing, and is split by what it says."""


def test_files_are_short_enough_to_say_one_thing():
    lengths = {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in SOURCES}
    assert {name: n for name, n in lengths.items() if n > LONGEST_FILE} == {}


def test_published_schema_is_current():
    published = json.loads((ROOT / "docs" / "dispatch-table.schema.json").read_text())
    assert published == json_schema(), "run ./dev docs"
