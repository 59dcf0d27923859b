"""Whether predicted impact is right: against the loss of models of which one product is replaced.

    ./dev bench impact [--quick] [--out benchmarks/results/impact.json]

Trains small click models, records their last steps, and compares the recorded impact with what the
emulation of one product does to the loss on fresh rows in float64. Prints one JSON object as the
last line; see docs/decisions/impact.md for what its keys mean.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from impact_models import Case, Rows, cases
from impact_replacement import ReplacedProducts, Replacement
from scipy.stats import spearmanr
from torch import nn

from loka_toolkit.analysis.impact import loss_impact
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.numerics.recipes import parse_recipe
from loka_toolkit.recording import Schedule, record

RECIPES = (
    "e4m3/tensorwise/fp32",
    "e4m3/rowwise/fp32",
    "e4m3/static/fp32",
    "e5m2/tensorwise/fp32",
    "e5m2/rowwise/fp32",
    "e5m2/static/fp32",
    "e4m3-e5m2/tensorwise/fp32",
)
RESOLVED = 3.0
"""A measured change counts from this many standard errors on."""


POOL = 1 << 16
"""Rows drawn at a time."""


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is done."""

    train: int
    record: int
    fresh_batches: int
    gradient_batches: int


FULL = Size(train=3000, record=80, fresh_batches=400, gradient_batches=64)
QUICK = Size(train=100, record=8, fresh_batches=20, gradient_batches=8)


def batches(case: Case, count: int, seed: int) -> Iterator[Rows]:
    """Draw batches, each row once."""
    per_draw = max(1, POOL // case.batch)
    for start in range(0, count, per_draw):
        pool = case.rows(per_draw * case.batch, seed * 1_000_003 + start)
        for number in range(min(per_draw, count - start)):
            yield pool.part(number * case.batch, (number + 1) * case.batch)


def train(case: Case, path: Path, size: Size) -> nn.Module:
    """Train a model, recording its last steps; return it."""
    torch.manual_seed(11)
    model = case.make()
    optimizer = torch.optim.Adam(model.parameters(), lr=case.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, size.train, eta_min=case.learning_rate * 1e-3
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, enabled=case.autocast is not None)
    stream = batches(case, (size.train + size.record) * case.micro_batches, seed=1)

    def one_step() -> None:
        optimizer.zero_grad()
        for _ in range(case.micro_batches):
            rows = next(stream)
            with torch.autocast("cpu", dtype=case.autocast, enabled=case.autocast is not None):
                output = model(rows)
            loss = case.loss(model, output.float(), rows)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(size.train):
        one_step()
        schedule.step()
    with record(model, path, schedule=Schedule.always(), recipes=RECIPES, seed=1) as recorder:
        for _ in range(size.record):
            one_step()
            recorder.step()
    return model


def predictions(path: Path) -> tuple[list[dict[str, Any]], float]:
    """Return one row per forward cell, and the baseline loss, from the trace alone."""
    trace = Trace.open(path)
    steps = trace.steps.to_pylist()
    baseline = float(np.mean([row["mean_loss"] for row in steps]))
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in trace.errors.to_pylist():
        if row["site"].endswith(":fwd"):
            # A static scale grows with the largest amax seen; take the steps where it has settled.
            if "static" in row["recipe"] and row["step"] < len(steps) // 2:
                continue
            cells.setdefault((row["site"], row["recipe"]), []).append(row)
    first, second, found = [], [], []
    length = max(len(rows) for rows in cells.values())
    for (site, recipe), rows in cells.items():
        known = [row for row in rows if row["impact_first_order"] is not None]
        pad = [math.nan] * (length - len(known))
        ones = [row["impact_first_order"] for row in known]
        twos = [row["impact_second_order"] for row in known]
        first.append(ones + pad)
        second.append(twos + pad)
        total = np.asarray(ones) + np.asarray(twos)
        found.append(
            {
                "site": site,
                "recipe": recipe,
                "steps": len(known),
                "reason": rows[0]["impact_reason"] if not known else None,
                "beyond_validity": float(np.mean([r["impact_status"] != "ok" for r in rows])),
                "first_order": float(np.mean(ones)) if known else None,
                "second_order": float(np.mean(twos)) if known else None,
                "predicted_raw": float(total.mean()) if known else None,
                "predicted_raw_se": float(total.std(ddof=1) / math.sqrt(len(total)))
                if len(total) > 1
                else None,
                "relative_error": float(np.mean([r["relative_frobenius"] for r in rows])),
                "scale_a": rows[-1]["scale_a"] if "static" in recipe else None,
                "scale_b": rows[-1]["scale_b"] if "static" in recipe else None,
            }
        )
    relative_first, relative_second = np.asarray(first) / baseline, np.asarray(second) / baseline
    posterior = loss_impact(relative_first, relative_second, np.ones(len(found)), seed=0)
    for row, mean in zip(found, posterior.mean, strict=True):
        row["predicted"] = None if math.isnan(mean) else float(mean) * baseline
    return found, baseline


def measure(case: Case, model: nn.Module, cells: list[dict[str, Any]], path: Path, size: Size):
    """Fill in the measured change of the mean loss on fresh rows, with its standard error."""
    double = copy.deepcopy(model).double().eval()
    sites = {
        row["site"]: (row["batch"], row["m"], row["n"], row["k"])
        for row in Trace.open(path).sites.to_pylist()
        if row["role"] == "fwd"
    }
    order = list(sites)
    replacements = [
        Replacement(
            order.index(row["site"]),
            "fwd",
            parse_recipe(row["recipe"]),
            row["scale_a"],
            row["scale_b"],
        )
        for row in cells
    ]
    sums, squares = np.zeros(len(cells)), np.zeros(len(cells))
    base = 0.0
    with torch.no_grad():
        for number, batch in enumerate(batches(case, size.fresh_batches, seed=2)):
            rows = batch.double()
            with ReplacedProducts() as plain:
                before = case.fresh_losses(double, rows)
            if number == 0:
                assert plain.seen == list(sites.values()), (plain.seen, sites)
            base += float(before.mean())
            for i, replacement in enumerate(replacements):
                with ReplacedProducts(replacement):
                    change = float((case.fresh_losses(double, rows) - before).mean())
                sums[i] += change
                squares[i] += change**2
    n = size.fresh_batches
    mean = sums / n
    error = np.sqrt(np.maximum(squares / n - mean**2, 0.0) / (n - 1))
    for row, value, se in zip(cells, mean, error, strict=True):
        row["measured"], row["measured_se"] = float(value), float(se)
        row["ratio"] = row["predicted"] / value if row["predicted"] and value > 0 else None
    return base / n


def agreement(cells: list[dict[str, Any]], key: str = "predicted") -> dict[str, float | int]:
    """Return correlation, slope and median ratio over the resolved cells."""
    chosen = [
        c for c in cells if c["measured"] > RESOLVED * c["measured_se"] and c[key] is not None
    ]
    chosen = [c for c in chosen if c[key] > 0]
    if len(chosen) < 3:
        return {"cells": len(chosen)}
    predicted = np.asarray([c[key] for c in chosen])
    measured = np.asarray([c["measured"] for c in chosen])
    error = np.asarray([c["relative_error"] for c in chosen])
    return {
        "cells": len(chosen),
        "spearman": float(spearmanr(predicted, measured).statistic),
        "slope": float(np.polyfit(np.log(measured), np.log(predicted), 1)[0]),
        "median_ratio": float(np.median(predicted / measured)),
        "relative_error_spearman": float(spearmanr(error, measured).statistic),
        "decades": float(np.log10(measured.max() / measured.min())),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    torch.set_num_threads(1)
    every = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases():
            if arguments.only and case.name not in arguments.only.split(","):
                continue
            start = time.perf_counter()
            path = Path(scratch) / case.name
            model = train(case, path, size)
            trained = time.perf_counter() - start
            cells, baseline = predictions(path)
            fresh = measure(case, model, cells, path, size)
            print(
                case.name,
                f"{trained:.0f}s + {time.perf_counter() - start - trained:.0f}s",
                f"baseline {baseline:.4f} fresh {fresh:.4f}",
                flush=True,
            )
            for c in cells:
                f = lambda x: "   none  " if x is None else f"{x:9.2e}"
                print(
                    f"  {c['site']:24} {c['recipe']:26} bv {c['beyond_validity']:.2f} 1st {f(c['first_order'])} 2nd {f(c['second_order'])} pred {f(c['predicted'])} meas {f(c['measured'])} z {c['measured'] / (c['measured_se'] + 1e-30):6.1f} ratio {f(c['ratio'])} {c['reason'] or ''}"
                )
            print("   ", agreement(cells))
            every += [{"model": case.name, **c} for c in cells]
    print(agreement(every))
    print(agreement([c for c in every if c["beyond_validity"] < 0.5]))


if __name__ == "__main__":
    main()
