"""The road split over two machines: record and replay on a GPU, analyze elsewhere, train on it.

    python benchmarks/road_on_gpu.py record --out OUT      # on the GPU: trace and replay results
    loka analyze OUT/trace --replay OUT/replay.parquet     # anywhere
    loka table build safety.parquet --replay OUT/replay.parquet --chip H200 --objective coverage
    python benchmarks/road_on_gpu.py train --table table.json --out OUT

The last command trains pairs of models, with and without the table, on rows of their own, and
prints one JSON object as its last line. One pair says little: any small change grows into another
trajectory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections import Counter
from pathlib import Path

import msgspec
import torch
from torch.nn import functional as F

import loka_toolkit as loka
from loka_toolkit.datasets.click_log import ClickLog
from loka_toolkit.environment import current_environment
from loka_toolkit.workflows.demo import paired_difference
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
    parser.add_argument("--pairs", type=int, default=6)
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
    """Train with and without the table, in pairs on rows of their own, and compare log losses."""
    losses: dict[bool, list[float]] = {False: [], True: []}
    hits: Counter[str] = Counter()
    misses: Counter[str] = Counter()
    for pair in range(arguments.pairs):
        for with_table in (False, True):
            log, model, optimizer = make(arguments)
            installation = (
                loka.install(model, arguments.table, allow_unmeasured=True) if with_table else None
            )
            for step in range(arguments.steps):
                train_step(model, optimizer, rows_at(log, arguments, pair * 10**5 + step))
            losses[with_table].append(evaluate(model, log, arguments, pair))
            if installation is not None:
                counts = installation.counts()
                hits.update(counts.hits)
                for by_role in counts.misses.values():
                    misses.update(by_role)
    found = paired_difference(losses[False], losses[True])
    print(
        json.dumps(
            {
                **msgspec.structs.asdict(found),
                "hits": hits,
                "misses": misses,
                "chip": current_environment().chip,
            }
        )
    )


@torch.no_grad()
def evaluate(model: TwoTower, log: ClickLog, arguments: argparse.Namespace, pair: int) -> float:
    """Return the mean log loss on fresh rows, in the arm's own precision."""
    parts = []
    for index in range(8):
        rows = rows_at(log, arguments, 10**8 + 8 * pair + index)
        with torch.autocast(arguments.device, dtype=torch.bfloat16):
            logits = model(rows)
        parts.append(F.binary_cross_entropy_with_logits(logits.float(), rows.clicks).double())
    return float(torch.stack(parts).mean())


def make(arguments: argparse.Namespace) -> tuple[ClickLog, TwoTower, torch.optim.Optimizer]:
    """Return the data, the model and the optimizer, seeded."""
    log = ClickLog(seed=0)
    torch.manual_seed(0)
    model = TwoTower(log.spec, embedding=32, hidden=arguments.hidden, width=128)
    model = model.to(arguments.device)
    return log, model, torch.optim.Adam(model.parameters(), lr=1e-3)


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
