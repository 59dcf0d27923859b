"""Settings and fixtures that every room's tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

# Deadlines measure the machine, not the code; speed has benchmarks of its own.
settings.register_profile("loka", deadline=None, print_blob=True)
settings.load_profile("loka")

# Products in tests are small: threads that wait for each other on a busy machine cost more than
# they bring. Subprocesses inherit the variable.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU; there is none here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real rows that are handed over beside the checkout and never committed."""
    folder = Path(os.environ.get("LOKA_SHARED_DATA", ROOT.parent / "shared")) / "data"
    if not folder.is_dir():
        pytest.skip(f"real rows are not at {folder} (LOKA_SHARED_DATA names another folder)")
    return folder
