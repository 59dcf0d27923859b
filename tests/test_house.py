"""The house itself: rooms, lean imports, line counts, the published schema, the wheel."""

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

HEAVY = ("pymc", "pandas", "matplotlib", "jinja2", "nutpie", "arviz", "pytensor", "numba")


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


def test_no_pickle_and_no_unsafe_load():
    for file in [*PACKAGE.rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] + [getattr(node, "module", "") or ""]
                assert not {"pickle", "cPickle", "dill", "cloudpickle"} & set(names), file


def test_published_schema_is_current():
    published = json.loads((ROOT / "docs" / "dispatch-table.schema.json").read_text())
    assert published == json_schema(), "run ./dev docs"
