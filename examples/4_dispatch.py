"""Stage 4: join safety and replay into a table, and train on with it.

python examples/4_dispatch.py --safety safety.parquet --replay replay.parquet --out table.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from click_model import make_model, rows, train_step

import loka_toolkit as loka


def main() -> None:
    """Build the table, install it, train, print what ran in FP8 and what did not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--safety", type=Path, required=True, help="the safety map")
    parser.add_argument("--replay", type=Path, required=True, help="the replay results")
    parser.add_argument("--out", type=Path, required=True, help="the table")
    options = parser.parse_args()

    table = loka.build_table(options.safety, options.replay, chip="cpu", objective="coverage")
    table.save(options.out)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with loka.install(model, options.out) as installation:
        for x, clicks in rows(20):
            loss = train_step(model, optimizer, x, clicks)
        counts = installation.counts()
    print(f"last loss {float(loss):.4f}")
    print(f"products in FP8, by role: {counts.hits}")
    print(f"sites in their own precision, by reason and role: {counts.sites_missed}")


if __name__ == "__main__":
    main()
