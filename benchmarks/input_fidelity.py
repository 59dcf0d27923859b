"""How close FP8 errors on drawn inputs come to the errors on the true operands.

Click models with hard inputs are trained on generated logs and recorded at the end. On later
batches, which the moments have not seen, the operands of every product are copied whole, and its
errors are averaged over batches and seeds: with the weights of the last recorded step (``true``),
and with training going on for some tens of steps (``later``). The same errors on operands drawn
from the trace, of the same shapes, are averaged over draws and seeds. A cell is a product of a
model under a recipe; its deviation is |drawn / true - 1|. Accumulation is exact, so that what is
compared is what inputs decide. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fidelity_models import MODELS, SPEC, Tapped, Taps, build

from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.datasets.click_log import ClickLog
from loka_toolkit.environment import current_environment
from loka_toolkit.harness.inputs import InputDrawer
from loka_toolkit.harness.moments import MomentsOfTrace
from loka_toolkit.harness.workloads import workloads_of
from loka_toolkit.numerics.emulation import emulate
from loka_toolkit.numerics.recipes import Scaling, parse_recipe
from loka_toolkit.numerics.scaling import STATIC_HEADROOM, decode_scale, finite_amax
from loka_toolkit.recording import Schedule, record
from loka_toolkit.workflows.two_tower import TensorBatch

RECIPES = (
    "e4m3/tensorwise/fp32",
    "e4m3/rowwise/fp32",
    "e4m3/static/fp32",
    "e5m2/tensorwise/fp32",
    "e5m2-e4m3/rowwise/fp32",
)
ROWS = {"attention": 256}
SPACING = 4
WINDOW = 60
"""Steps before the comparison in which every SPACING-th is recorded, the last of all among them:
what is measured is how well inputs are drawn, and not how far training moves on from a record."""

UNSEEN = 1_000_000
"""First of the batches that no step was trained on."""
EXACT = 1e-6
"""Errors below are rounding of float32: a product of single elements under their own scales."""

Cell = tuple[str, str, str]
Errors = dict[Cell, list[float]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, two models, few draws")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=None)
    parser.add_argument("--steps", type=int, default=300, help="training steps before comparing")
    parser.add_argument(
        "--batches", type=int, default=None, help="later steps, and draws, compared"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    models = arguments.models or (("two-tower", "wide") if arguments.quick else MODELS)
    seeds = arguments.seeds or ([0] if arguments.quick else [0, 1, 2, 3])
    batches = arguments.batches or (6 if arguments.quick else 10)
    rows: list[dict[str, Any]] = []
    for model in models:
        start = time.perf_counter()
        found = [compare(model, seed, arguments.steps, batches) for seed in seeds]
        rows += list(cells_of(model, found))
        print(f"{model}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    result = summary(rows) | {
        "command": _command(),
        "models": list(models),
        "seeds": seeds,
        "steps": arguments.steps,
        "batches": batches,
        "recipes": list(RECIPES),
        "chip": current_environment().chip,
        "torch": str(torch.__version__),
        "rows": rows,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if name != "rows"}))


def _command() -> str:
    """Return the command line, without the file that the result goes to."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return "benchmarks/" + " ".join(words)


def compare(name: str, seed: int, steps: int, batches: int) -> dict[str, Errors]:
    """Return the errors of one trained model on true, later, drawn and unit normal operands."""
    torch.manual_seed(seed)
    taps = Taps()
    model = build(name, taps)
    log = ClickLog(SPEC, seed=seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=1e-4)
    rows = ROWS.get(name, 1024)

    def train(step: int, *, hold: bool = False) -> None:
        batch = TensorBatch.of(log.batch(rows, seed=step))
        optimizer.zero_grad()
        logits = model(batch)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.clicks).backward()
        if hold:
            return
        optimizer.step()
        if step < steps:
            decay.step()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        schedule = Schedule(start=steps - WINDOW + SPACING - 1, warm_steps=0, every=SPACING)
        options: dict[str, Any] = {"recipes": RECIPES[:1], "max_rows": 16, "max_columns": 16}
        with record(model, path, schedule=schedule, **options) as recorder:
            for step in range(steps):
                train(step, hold=step == steps - 1)
                recorder.step()
        trace = Trace.open(path)
        moments = MomentsOfTrace(trace)
        drawer = InputDrawer(moments, torch.device("cpu"), seed)
        workloads = {str(w.site): w for w in workloads_of(trace).workloads}
        drawn, unit = defaultdict(list), defaultdict(list)
        amax = {}
        for site, workload in workloads.items():
            for index in range(batches):
                draw = drawer.draw(workload, index)
                if draw.inputs != "moments":
                    raise RuntimeError(f"{site} was drawn from: {draw.inputs}")
                amax[site] = (draw.amax_a, draw.amax_b)
                for recipe, error in errors(draw.a, draw.b, amax[site]):
                    drawn[(*split(site), recipe)].append(error)
            normal = torch.randn(draw.a.shape), torch.randn(draw.b.shape)
            known = tuple(float(finite_amax(x)) for x in normal)
            for recipe, error in errors(*normal, known):
                unit[(*split(site), recipe)].append(error)
    true, later = defaultdict(list), defaultdict(list)

    def take(into: Errors) -> None:
        for layer, tapped in (taps.found or {}).items():
            for role, (a, b) in products(tapped).items():
                for recipe, error in errors(a, b, amax[f"{layer}:{role}"]):
                    into[(layer, role, recipe)].append(error)

    for batch in range(batches):
        taps.found = {}
        train(UNSEEN + batch, hold=True)
        take(true)
    for step in range(steps, steps + SPACING * batches):
        taps.found = {} if (step + 1) % SPACING == 0 else None
        train(step)
        take(later)
    if set(true) != set(drawn):
        raise RuntimeError(f"{name}: recorded and tapped products differ")
    return {"true": true, "later": later, "drawn": drawn, "unit_normal": unit}


def split(site: str) -> tuple[str, str]:
    """Return layer and role of a site."""
    layer, _, role = site.rpartition(":")
    return layer, role


def products(tapped: Tapped) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the factors of a layer's products by role; a parameter's dgrad may be missing."""
    left, right, g = tapped.left, tapped.right, tapped.gradient
    if g is None:
        raise RuntimeError("a tapped product had no backward")
    if not tapped.has_parameter:
        return {"fwd": (left, right), "grad_a": (g, right.mT), "grad_b": (left.mT, g)}
    found = {"fwd": (left, right.mT), "wgrad": (g.mT, left)}
    return found | ({"dgrad": (g, right)} if tapped.has_dgrad else {})


def errors(
    a: torch.Tensor, b: torch.Tensor, amax: tuple[float | None, ...]
) -> Iterator[tuple[str, float]]:
    """Yield the relative Frobenius error of a product under every recipe, whole."""
    reference = a.double() @ b.double()
    size = float(reference.norm())
    for name in RECIPES:
        recipe = parse_recipe(name)
        scales: dict[str, torch.Tensor] = {}
        if recipe.scaling is Scaling.STATIC:
            for side, known, fmt in zip(("a", "b"), amax, recipe.formats, strict=True):
                value = torch.tensor(known or 0.0)
                scales[f"scale_{side}"] = decode_scale(value, fmt, headroom=STATIC_HEADROOM)
        product = emulate(a, b, recipe, **scales)
        yield name, float((product.double() - reference).norm()) / size


def cells_of(model: str, found: list[dict[str, Errors]]) -> Iterator[dict[str, Any]]:
    """Yield one row per cell of a model, seeds pooled."""
    for layer, role, recipe in found[0]["true"]:
        cell = (layer, role, recipe)
        seeds = {
            what: [statistics.fmean(errors[what][cell]) for errors in found] for what in found[0]
        }
        mean = {what: statistics.fmean(values) for what, values in seeds.items()}
        yield {
            "model": model,
            "layer": layer,
            "role": role,
            "recipe": recipe,
            **mean,
            "true_standard_error": standard_error(seeds["true"]),
            "drawn_standard_error": standard_error(seeds["drawn"]),
            "deviation": deviation(mean["drawn"], mean["true"]),
            "later_deviation": deviation(mean["drawn"], mean["later"]),
            "unit_normal_deviation": deviation(mean["unit_normal"], mean["true"]),
            "per_seed": [
                round(deviation(drawn, true), 4)
                for drawn, true in zip(seeds["drawn"], seeds["true"], strict=True)
            ],
        }


def deviation(drawn: float, true: float) -> float:
    """Return |drawn / true - 1|; 0 where both are exact."""
    if max(drawn, true) < EXACT:
        return 0.0
    return abs(drawn / true - 1) if true > 0 else math.inf


def standard_error(values: list[float]) -> float | None:
    """Return the standard error of a mean over seeds; None of one seed."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that are quoted."""
    result: dict[str, Any] = {"cells": len(rows)}
    for role in ("fwd", "dgrad", "wgrad", "grad_a", "grad_b"):
        found = [row["deviation"] for row in rows if row["role"] == role]
        if found:
            later = [row["later_deviation"] for row in rows if row["role"] == role]
            result[f"worst_{role}_later"] = max(later)
            result[f"median_{role}_later"] = statistics.median(later)
            result[f"worst_{role}"] = max(found)
            result[f"median_{role}"] = statistics.median(found)
            result[f"over_10_percent_{role}"] = sum(value > 0.1 for value in found)
            result[f"cells_{role}"] = len(found)
    judged = [row for row in rows if row["role"] in ("fwd", "dgrad")]
    # A ratio: unit normals are too large by this factor at worst, or too small.
    ratios = [row["unit_normal"] / row["true"] for row in judged if row["true"] > EXACT]
    result["unit_normal_worst"] = max(max(ratio, 1 / ratio) for ratio in ratios) - 1
    return result


if __name__ == "__main__":
    main()
