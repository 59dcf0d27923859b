"""How far errors on sampled output rows and columns are from those on the full outputs.

    python benchmarks/subsampling.py [--quick] [--out benchmarks/results/subsampling.json]

Models are trained on generated click logs with heavy-tailed raw counts, then recorded. Beside every
error that the recorder computes on its sample, the same product is emulated in full: scales from
the full tensors, every row and column, the accumulator on every product. The figure is the relative
difference of the two relative Frobenius errors. Products that the recorder does not sample, because
they are small, are counted and left out. Keys: per role and recipe the number of cells, the worst
and the median difference.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import statistics
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from loka_toolkit.artifacts.sites import Operand, Role
from loka_toolkit.datasets.click_log import ClickLog, ClickLogSpec
from loka_toolkit.numerics.emulation import emulate
from loka_toolkit.numerics.metrics import product_error
from loka_toolkit.numerics.recipes import Recipe, Scaling
from loka_toolkit.numerics.scaling import operand_scale
from loka_toolkit.recording import Schedule, observer, record
from loka_toolkit.recording.products import Factors
from loka_toolkit.recording.samples import Sample
from loka_toolkit.recording.scalebook import ScaleBook
from loka_toolkit.recording.whatif import RecipeError
from loka_toolkit.recording.whole import WholeSample

RECIPES = (
    "e4m3/tensorwise/fast",
    "e4m3/rowwise/fast",
    "e4m3/static/fast",
    "e5m2-e4m3/tensorwise/fast",
    "e4m3/tensorwise-rowwise/promoted-128",
    "e4m3/blockwise/promoted-128",
    "e4m3/mxfp8/fp32",
    "e4m3fnuz/tensorwise/fp32",
    "bf16-e4m3/rowwise/fp32",
    "bf16",
)
LIMITS = {"fwd": 0.05, "dgrad": 0.05, "wgrad": 0.20, "grad_a": 0.05, "grad_b": 0.05}
BATCH = 4096
LARGE_BATCH = 16384
FLOAT32_ROUNDING = 1e-6
"""Relative errors below this are those of float32 sums and not of a recipe: blocks of one entry,
for example, are cast without error."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One product under one recipe.

    Attributes:
        model: Name of the model.
        role: Role of the product.
        shape: Products, M, N, K.
        recipe: Name of the recipe.
        sampled: Relative error on the sample.
        full: Relative error on the full output.
    """

    model: str
    role: str
    shape: tuple[int, int, int, int]
    recipe: str
    sampled: float
    full: float

    @property
    def difference(self) -> float:
        """Relative difference of the two."""
        return abs(self.sampled / self.full - 1.0)


class Attention(nn.Module):
    """A block over the fields of a row: tokens, one head, explicit products of activations."""

    def __init__(self, fields: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(fields, width) * 0.3)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(fields * width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [B] of values [B, fields]."""
        tokens = x.unsqueeze(-1) * self.embed
        q, k, v = self.qkv(tokens).chunk(3, dim=-1)
        weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1)
        mixed = torch.relu(self.out(weights @ v)) + tokens
        return self.head(mixed.flatten(1)).squeeze(-1)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its mean loss on a batch."""

    model: nn.Module
    loss: Callable[[int], torch.Tensor]


def cases(quick: bool) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield models by name; they are built when called."""
    yield "mlp-raw-counts", lambda: mlp(raw=True)
    yield "attention", attention
    yield "deepctr-dcn", lambda: deepctr("vector")
    if not quick:
        yield "mlp-log-counts", lambda: mlp(raw=False)
        yield f"mlp-raw-counts-{LARGE_BATCH}", lambda: mlp(raw=True, batch=LARGE_BATCH)
        yield "deepctr-dcn-matrix", lambda: deepctr("matrix")


def _log(seed: int, batch: int = BATCH) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = ClickLog().batch(batch, seed=seed)
    counts = np.concatenate([rows.user_counts, rows.item_counts], axis=1)
    categories = np.concatenate([rows.user_categories, rows.item_categories], axis=1)
    return (
        torch.from_numpy(counts).float(),
        torch.from_numpy(categories).long(),
        torch.from_numpy(rows.clicks).float(),
    )


def mlp(raw: bool, batch: int = BATCH) -> Case:
    """Counts beside embeddings, four layers of 256."""
    spec = ClickLogSpec()
    sizes = spec.user_cardinalities + spec.item_cardinalities
    embeddings = nn.ModuleList(nn.Embedding(size, 16) for size in sizes)
    widths = [13 + 16 * len(sizes), 256, 256, 128]
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise(widths):
        layers += [nn.Linear(i, o), nn.LayerNorm(o), nn.ReLU()]
    body = nn.Sequential(*layers, nn.Linear(128, 1))
    model = nn.ModuleDict({"embeddings": embeddings, "body": body})

    def loss(step: int) -> torch.Tensor:
        counts, categories, clicks = _log(step, batch)
        dense = counts if raw else torch.log1p(counts)
        parts = [e(c) for e, c in zip(embeddings, categories.T, strict=True)]
        logits = body(torch.cat([dense, *parts], 1)).squeeze(-1)
        return functional.binary_cross_entropy_with_logits(logits, clicks)

    return Case(model, loss)


def attention() -> Case:
    """Tokens scaled by log counts."""
    model = Attention(13, 32)

    def loss(step: int) -> torch.Tensor:
        counts, _, clicks = _log(step)
        return functional.binary_cross_entropy_with_logits(model(torch.log1p(counts)), clicks)

    return Case(model, loss)


def deepctr(parameterization: str) -> Case:
    """The third-party DCN, counts raw."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepctr_torch.inputs import DenseFeat, SparseFeat
        from deepctr_torch.models import DCN

        spec = ClickLogSpec()
        sizes = spec.user_cardinalities + spec.item_cardinalities
        columns = [SparseFeat(f"C{i}", size, embedding_dim=8) for i, size in enumerate(sizes)]
        columns += [DenseFeat(f"I{i}", 1) for i in range(13)]
        model = DCN(columns, columns, cross_parameterization=parameterization, seed=0)

    def loss(step: int) -> torch.Tensor:
        counts, categories, clicks = _log(step)
        rows = torch.cat([categories.float(), torch.log1p(counts)], 1)
        return functional.binary_cross_entropy(model(rows).squeeze(-1), clicks)

    return Case(model, loss)


def full_error(factors: Factors, recipe: Recipe, book: ScaleBook) -> float | None:
    """Return the relative error of the whole product."""
    scales = []
    sides = zip(
        ("a", "b"),
        (factors.a, factors.b),
        factors.operands,
        recipe.formats,
        recipe.scalings,
        strict=True,
    )
    for side, x, operand, fmt, scaling in sides:
        static = None
        if scaling is Scaling.STATIC:  # known from earlier steps only
            static = book.scale(str(operand), x, fmt, scaling, -1)
        parameter = operand is Operand.W
        scales.append(operand_scale(x, fmt, scaling, side, static, parameter=parameter))  # type: ignore[arg-type]
    product = emulate(factors.a, factors.b, recipe, scale_a=scales[0], scale_b=scales[1])
    return product_error(factors.a.double() @ factors.b.double(), product).relative_frobenius


@contextlib.contextmanager
def compared(model: str, cells: list[Cell], skipped: list[str]) -> Iterator[None]:
    """Compute the full error beside every sampled one."""
    sampled_errors = observer.recipe_errors

    def both(
        factors: Factors,
        sample: Sample,
        recipes: tuple[Recipe, ...],
        book: ScaleBook,
        exhaustive: int,
        whole: WholeSample | None = None,
    ) -> list[RecipeError]:
        found = sampled_errors(factors, sample, recipes, book, exhaustive, whole)
        shape = (factors.batch, *factors.dims)
        if sample.exact.numel() == factors.batch * shape[1] * shape[2]:
            skipped.append(str(factors.role))
            return found
        for error in found:
            full = full_error(factors, error.recipe, book)
            sampled = error.metrics.relative_frobenius
            if sampled is not None and full is not None and full > FLOAT32_ROUNDING:
                cells.append(
                    Cell(model, str(factors.role), shape, error.recipe.name, sampled, full)
                )
        return found

    with mock.patch.object(observer, "recipe_errors", both):
        yield


def measure(name: str, case: Case, train: int, steps: int) -> tuple[list[Cell], int]:
    """Train, record and compare."""
    optimizer = torch.optim.Adam(case.model.parameters(), lr=1e-3)
    cells: list[Cell] = []
    skipped: list[str] = []
    schedule = Schedule(start=train, warm_steps=steps + 1, every=None)
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),
        record(case.model, Path(folder) / "run", schedule=schedule, recipes=RECIPES) as recorder,
    ):
        warnings.simplefilter("ignore")
        for step in range(train + steps + 1):
            # One recorded step more, whose amax makes the static scales of the next.
            watch = compared(name, cells, skipped) if step > train else contextlib.nullcontext()
            with watch:
                optimizer.zero_grad()
                case.loss(step).backward()
                optimizer.step()
                recorder.step()
    return cells, len(skipped)


def summary(cells: list[Cell]) -> dict[str, Any]:
    """Return count, worst and median difference."""
    worst = max(cells, key=lambda cell: cell.difference)
    return {
        "cells": len(cells),
        "worst": round(worst.difference, 4),
        "median": round(statistics.median(cell.difference for cell in cells), 4),
        "worst_cell": f"{worst.model} {worst.recipe} {worst.shape}",
    }


def main() -> None:
    """Measure and print; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer models and steps")
    parser.add_argument("--models", nargs="*", help="only these")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    train, steps = (10, 1) if arguments.quick else (60, 2)
    cells: list[Cell] = []
    whole = 0
    for name, build in cases(arguments.quick):
        if arguments.models and name not in arguments.models:
            continue
        torch.manual_seed(0)
        found, skipped = measure(name, build(), train, steps)
        cells += found
        whole += skipped
        worst = max((cell.difference for cell in found), default=0.0)
        print(f"{name}: {len(found)} cells, worst {worst:.1%}", flush=True)
    by_role: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_role[cell.role].append(cell)
    recipes = {r: summary([c for c in cells if c.recipe == r]) for r in RECIPES}
    roles = {role: summary(found) for role, found in sorted(by_role.items())}
    result = {
        "torch": str(torch.__version__),
        "batch": BATCH,
        "steps": steps,
        "products_not_sampled": whole,
        "roles": roles,
        "recipes": recipes,
        "within_limits": all(roles[role]["worst"] <= LIMITS[Role(role)] for role in roles),
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
