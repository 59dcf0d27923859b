"""Stage 1: record a training run.

python examples/1_record.py --out RUN
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from click_model import make_model, rows, train_step

import loka_toolkit as loka


def main() -> None:
    """Train under the recorder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the trace")
    options = parser.parse_args()

    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = loka.Schedule(warm_steps=20, every=5)
    # On a CPU, scaled_mm accumulates in float32; on a GPU leave the default recipes.
    recipes = ["e4m3/tensorwise/fp32", "e4m3/rowwise/fp32", "e5m2-e4m3/tensorwise/fp32"]
    with loka.record(model, options.out, schedule=schedule, recipes=recipes) as recorder:
        for x, clicks in rows(60):
            loss = train_step(model, optimizer, x, clicks)
            recorder.step(loss=loss, examples=len(clicks), reduction="mean")
    status = loka.Trace.open(options.out).manifest.status
    print(f"{status.steps_recorded} of {status.steps_seen} steps recorded in {options.out}")


if __name__ == "__main__":
    main()
