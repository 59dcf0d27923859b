"""The Triton kernels where there is no GPU: their tests in a process that interprets Triton.

Triton reads ``TRITON_INTERPRET`` when a kernel is defined, its own library's included, and other
tests may have imported Triton by now: hence a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).resolve().parent
FILES = ("test_triton_cast.py", "test_triton_gemm.py", "test_triton_judged.py")


@pytest.mark.slow
def test_the_triton_kernels_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [*command, *(str(HERE / file) for file in FILES)],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parents[1],
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.splitlines()[-1]
    passed = re.match(r"(\d+) passed", summary)
    assert passed is not None and int(passed[1]) > 150, summary
    assert "skipped" not in summary, summary
