"""What it costs to catch products in Python, on a CPU and in eager mode.

Four modules call one thing many times, plain and with a table installed whose entries leave the
forward in its own precision (only wgrad is routed), so that what is timed is the catching and no
kernel: a product, an element-wise function, an attribute of a tensor, and a module inside. The last
line printed is one JSON object: microseconds of processor time per call, the best of several runs.

python benchmarks/caught_products.py [--quick] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from loka_toolkit.artifacts.dispatch_table import (
    KIND,
    SCHEMA_VERSION,
    DispatchTable,
    Entry,
    Evidence,
    Objective,
)
from loka_toolkit.dispatch import install
from loka_toolkit.dispatch.validate import validators_for
from loka_toolkit.environment import current_environment, timestamp
from loka_toolkit.kernels.catalog import find_candidate
from loka_toolkit.numerics.tolerance import Tolerance

RECIPE = "e4m3/tensorwise/fp32"
TOKENS, WIDTH = 16, 8


class Caller(nn.Module):
    """One product with its parameter, then one call many times."""

    def __init__(self, call: Callable[[Caller, torch.Tensor], object], repeats: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.inner = Nothing()
        self.call, self.repeats = call, repeats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x w."""
        for _ in range(self.repeats):
            self.call(self, x)
        return torch.matmul(x, self.weight)


class Nothing(nn.Module):
    """A module without products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x."""
        return x


CALLS: dict[str, Callable[[Caller, torch.Tensor], object]] = {
    "product": lambda module, x: torch.matmul(x, module.weight),
    "function": lambda module, x: torch.relu(x),
    "attribute": lambda module, x: x.shape,
    "module": lambda module, x: module.inner(x),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--out", type=Path, help="write the result here as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    repeats, runs = (100, 3) if arguments.quick else (1000, 15)
    rows = {name: measured(call, repeats, runs) for name, call in CALLS.items()}
    for name, row in rows.items():
        print(f"{name:10} plain {row['plain_us']:6.2f} us, installed {row['installed_us']:6.2f} us")
    result = {"torch": str(torch.__version__), "chip": current_environment().chip, "calls": rows}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def measured(
    call: Callable[[Caller, torch.Tensor], object], repeats: int, runs: int
) -> dict[str, float]:
    """Return microseconds per call, plain and installed."""
    module, x = Caller(call, repeats), torch.randn(TOKENS, WIDTH)
    plain = best(module, x, runs)
    with install(module, table()) as installation:
        installed = best(module, x, runs)
        if installation.counts().misses:
            raise RuntimeError(f"products missed: {installation.counts().misses}")
    return {"plain_us": plain, "installed_us": installed, "overhead_us": installed - plain}


def best(module: Caller, x: torch.Tensor, runs: int) -> float:
    """Return microseconds per call of the fastest run."""
    times = []
    for _ in range(runs + 1):
        start = time.process_time()
        module(x)
        times.append(time.process_time() - start)
    return min(times[1:]) / module.repeats * 1e6


def table() -> DispatchTable:
    """Return a table that routes the weight's gradient and nothing else."""
    candidate = find_candidate(f"torch.scaled_mm/{RECIPE}")
    environment = current_environment()
    entry = Entry(
        fqn="(root)",
        call=0,
        role="wgrad",
        token_axis="k",
        tokens_min=1,
        tokens_max=2 * TOKENS,
        m=WIDTH,
        n=WIDTH,
        k=None,
        batch=1,
        dtype="float32",
        layout="column,row",
        candidate=candidate.name,
        library=candidate.library,
        library_version=candidate.version(),
        recipe=RECIPE,
        scale_policy="dynamic",
        scale_a=None,
        scale_b=None,
        fallback="default",
        evidence=Evidence("safe", None, RECIPE, "none", "none", None, None, "a benchmark"),
        weight="weight",
    )
    return DispatchTable(
        kind=KIND,
        schema_version=SCHEMA_VERSION,
        created=timestamp(),
        chip="cpu",
        objective=Objective.COVERAGE,
        environment=environment,
        config={},
        tolerance=Tolerance(),
        safety_digest="",
        replay_digest=None,
        validators=validators_for("cpu", environment, [entry], {candidate.name: candidate}),
        entries=(entry,),
        layers=(),
        misses=(),
    )


if __name__ == "__main__":
    main()
