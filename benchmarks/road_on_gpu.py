"""The road split over two machines: record and replay on a GPU, analyze elsewhere, train on it.

    python benchmarks/road_on_gpu.py record --out OUT      # on the GPU: trace and replay results
    loka analyze OUT/trace --replay OUT/replay.parquet     # anywhere
    loka table build safety.parquet --replay OUT/replay.parquet --chip H200 --objective coverage
    python benchmarks/road_on_gpu.py train --table table.json --out OUT

The last command trains the same model from the same seed with and without the table, evaluates both
on the same fresh rows, and prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import loka_toolkit as loka
from loka_toolkit.datasets.click_log import ClickLog
from loka_toolkit.environment import current_environment
from loka_toolkit.workflows.two_tower import TensorBatch, TwoTower

RECIPES = (
    "e4m3/tensorwise/fast",
    "e4m3/rowwise/fast",
    "e4m3/static/fast",
    "e5m2-e4m3/tensorwise/fast",
)


def main() -> None:
    """Parse and run one stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=["record", "train"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    if arguments.stage == "record":
        record(arguments)
    else:
        train(arguments)


def record(arguments: argparse.Namespace) -> None:
    """Train under the recorder, then replay the trace."""
    log, model, optimizer = make(arguments)
    schedule = loka.Schedule(warm_steps=40, warm_every=2, every=4)
    begin = time.perf_counter()
    with loka.record(
        model, arguments.out / "trace", schedule=schedule, recipes=RECIPES, force=True
    ) as recorder:
        for step in range(arguments.steps):
            loss = train_step(model, optimizer, rows_at(log, arguments, step))
            recorder.step(loss=loss, examples=arguments.batch, reduction="mean")
    torch.cuda.synchronize() if arguments.device == "cuda" else None
    recorded = time.perf_counter() - begin
    begin = time.perf_counter()
    results = loka.replay(
        arguments.out / "trace", arguments.out / "replay.parquet", device=arguments.device
    )
    statuses: dict[str, int] = {}
    for row in results.rows:
        key = f"{row.candidate} {row.status}"
        statuses[key] = statuses.get(key, 0) + 1
    print(
        json.dumps(
            {
                "seconds_recording": recorded,
                "seconds_replay": time.perf_counter() - begin,
                "statuses": statuses,
                "chip": current_environment().chip,
            }
        )
    )


def train(arguments: argparse.Namespace) -> None:
    """Train with and without the table and compare the log losses of the same fresh rows."""
    losses = {}
    counts = {}
    for arm in ("default", "table"):
        log, model, optimizer = make(arguments)
        installation = (
            loka.install(model, arguments.table, allow_unmeasured=True) if arm == "table" else None
        )
        for step in range(arguments.steps):
            train_step(model, optimizer, rows_at(log, arguments, step))
        with torch.no_grad(), autocast(arguments):
            parts = [
                F.binary_cross_entropy_with_logits(
                    model(rows).float(), rows.clicks, reduction="none"
                )
                for rows in (rows_at(log, arguments, 10**6 + i) for i in range(16))
            ]
        losses[arm] = torch.cat(parts).double().cpu().numpy()
        if installation is not None:
            found = installation.counts()
            counts = {"hits": found.hits, "misses": found.misses}
    difference = losses["table"] - losses["default"]
    base = float(losses["default"].mean())
    print(
        json.dumps(
            {
                "log_loss_default": base,
                "relative_difference": float(difference.mean()) / base,
                "standard_error": float(difference.std(ddof=1) / np.sqrt(len(difference))) / base,
                "counts": counts,
                "chip": current_environment().chip,
            }
        )
    )


def make(arguments: argparse.Namespace) -> tuple[ClickLog, TwoTower, torch.optim.Optimizer]:
    """Return the data, the model and the optimizer, seeded."""
    log = ClickLog(seed=0)
    torch.manual_seed(0)
    model = TwoTower(log.spec, embedding=32, hidden=arguments.hidden, width=128)
    model = model.to(arguments.device)
    return log, model, torch.optim.Adam(model.parameters(), lr=1e-3)


def autocast(arguments: argparse.Namespace) -> torch.autocast:
    """Return BF16 autocast on the device."""
    return torch.autocast(arguments.device, dtype=torch.bfloat16)


def train_step(
    model: TwoTower, optimizer: torch.optim.Optimizer, rows: TensorBatch
) -> torch.Tensor:
    """Take one step under BF16 autocast; return the loss."""
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(rows.clicks.device.type, dtype=torch.bfloat16):
        logits = model(rows)
    loss = F.binary_cross_entropy_with_logits(logits.float(), rows.clicks)
    loss.backward()
    optimizer.step()
    return loss.detach()


def rows_at(log: ClickLog, arguments: argparse.Namespace, step: int) -> TensorBatch:
    """Return the rows of a step on the device."""
    batch = TensorBatch.of(log.batch(arguments.batch, step))
    moved = {f.name: getattr(batch, f.name).to(arguments.device) for f in dataclasses.fields(batch)}
    return TensorBatch(**moved)


if __name__ == "__main__":
    main()
