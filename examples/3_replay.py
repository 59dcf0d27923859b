"""Stage 3: which kernels are right, and how fast? Replay a trace on inputs drawn from its moments.

python examples/3_replay.py --run RUN --out replay.parquet
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import loka_toolkit as loka


def main() -> None:
    """Replay and print how the candidates fared; a second call resumes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="directory of the trace")
    parser.add_argument("--out", type=Path, required=True, help="the results")
    options = parser.parse_args()

    candidates = ["torch.matmul/fp32", "torch.scaled_mm/*/fp32"]
    results = loka.replay(options.run, options.out, candidates=candidates, draws=1)
    for (candidate, status), count in Counter(
        (r.candidate, r.status) for r in results.rows
    ).items():
        print(f"{candidate:44} {status:16} {count}")


if __name__ == "__main__":
    main()
