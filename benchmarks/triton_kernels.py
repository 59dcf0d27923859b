"""Own Triton casts and products beside torch's scaled_mm and BF16, at shapes of click models.

Every quantity has a row of its own: each cast of x[M,K], each product alone; ratios over compiled
BF16 are put together from these rows, so that what a cast costs is seen and not hidden. A time is
the median over 30 replays of a CUDA graph of at least 10 calls on rotating copies of the operands
that together exceed twice the L2 cache (as the harness' policy ``cuda-graph``), with the 10 and
90 % quantiles beside it. A quantity that fails has its error in place of its time. The last line
printed is one JSON object. Needs torch, Triton and msgspec, nothing else.

Without a GPU, and with ``TRITON_INTERPRET=1`` set, everything runs once at tiny shapes: that checks
this script, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn import functional

from loka_toolkit.environment import current_environment
from loka_toolkit.kernels.contract import Side
from loka_toolkit.kernels.torch_scaled_mm import TorchScaledMM
from loka_toolkit.kernels.triton_cast import Layout, cast_by_line, cast_with_scale, interpreted
from loka_toolkit.kernels.triton_gemm import tile_for
from loka_toolkit.kernels.triton_scaled_mm import TritonScaledMM
from loka_toolkit.numerics.formats import E4M3
from loka_toolkit.numerics.recipes import parse_recipe

SHAPES = (
    (2048, 768, 256),
    (4096, 1024, 1024),
    (8192, 1024, 1024),
    (8192, 2048, 2048),
    (16384, 1024, 512),
    (16384, 4096, 4096),
    (65536, 512, 512),
    (2048, 1024, 16384),
)
"""M, N, K: layers of click and ranking models; the last is a weight gradient."""

QUICK = SHAPES[:1] + SHAPES[3:4]
TINY = ((20, 24, 40),)

CALLS_PER_GRAPH = 10
REPLAYS = 30
MOST_COPIES = 32

COMPILED_BF16 = "product bf16 compiled"
STATIC_CAST = "cast triton static row-major"
ROWWISE_CAST = "cast triton rowwise row-major"

Pair = tuple[torch.Tensor, torch.Tensor]
Quantity = tuple[str, Callable[[Pair], Callable[[], object]]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="two shapes, a quarter of the time")
    parser.add_argument("--seconds", type=float, default=0.4, help="at most, per quantity")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not interpreted()
    if not on_gpu and not interpreted():
        sys.exit("there is no GPU here; TRITON_INTERPRET=1 checks the script without one")
    device = torch.device("cuda" if on_gpu else "cpu")
    seconds = arguments.seconds / 4 if arguments.quick else arguments.seconds
    shapes = (QUICK if arguments.quick else SHAPES) if on_gpu else TINY
    begin, clocks = time.perf_counter(), [_clocks()]
    results = []
    for shape in shapes:
        results.append(measured(shape, seconds, device))
        _print_table(results[-1])
        clocks.append(_clocks())
    result = {
        "environment": msgspec.to_builtins(current_environment()),
        "device": str(device),
        "interpreted": interpreted(),
        "clocks": clocks,
        "seconds": time.perf_counter() - begin,
        "shapes": results,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def measured(shape: tuple[int, int, int], seconds: float, device: torch.device) -> dict[str, Any]:
    """Return times and ratios at one shape."""
    m, n, k = shape
    generator = torch.Generator(device).manual_seed(0)

    def draw(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, generator=generator).to(torch.bfloat16)

    x, w = draw(m, k), draw(n, k)
    copies = _copies(x.numel() + w.numel(), device)
    pairs = [(x, w), *((x.clone(), w.clone()) for _ in range(copies - 1))]
    if device.type == "cuda":
        torch.compiler.reset()  # or the recompile limit turns compiled functions into eager ones
    times: dict[str, dict[str, Any]] = {}
    for name, prepared in quantities(device):
        try:
            times[name] = _times([prepared(pair) for pair in pairs], seconds, device)
        except Exception as error:  # a kernel that fails is a result
            times[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
    return {
        "m": m,
        "n": n,
        "k": k,
        "tile": dataclasses.asdict(tile_for(m, n, k)),
        "relative_difference": _difference(x, w),
        "times_us": times,
        "speedup_over_compiled_bf16": _speedups(times),
    }


def quantities(device: torch.device) -> Iterator[Quantity]:
    """Yield every quantity: its name, and what makes one call of it ready for a pair x, w."""
    yield "product bf16", lambda pair: lambda: pair[0] @ pair[1].mT
    if device.type == "cuda":
        compiled = torch.compile(torch.mm, fullgraph=True, dynamic=False)
        yield COMPILED_BF16, lambda pair: lambda: compiled(pair[0], pair[1].mT)
    for grain in ("tensorwise", "rowwise"):
        for accumulation in ("fast", "promoted-128"):
            recipe = parse_recipe(f"e4m3/{grain}/{accumulation}")
            if device.type == "cuda":
                yield (
                    f"product torch.scaled_mm {grain} {accumulation}",
                    _product_of(TorchScaledMM(recipe)),
                )
            yield f"product triton {grain} {accumulation}", _product_of(TritonScaledMM(recipe))
    yield from _own_casts(device)
    yield from _torch_casts(device)


def _product_of(candidate: TorchScaledMM | TritonScaledMM) -> Callable[[Pair], Any]:
    def ready(pair: Pair) -> Callable[[], object]:
        a, b = candidate.prepare(pair[0], Side.A), candidate.prepare(pair[1].mT, Side.B)
        return lambda: candidate.run(a, b, torch.bfloat16)

    return ready


def _own_casts(device: torch.device) -> Iterator[Quantity]:
    scale = torch.tensor(0.01, device=device)
    row, column = Layout.ROW, Layout.COLUMN
    for given, name in ((scale, "static"), (None, "tensorwise")):
        for layouts, said in (
            ((row,), "row-major"),
            ((column,), "column-major"),
            ((row, column), "both layouts"),
        ):
            yield (
                f"cast triton {name} {said}",
                lambda pair, g=given, la=layouts: lambda: cast_with_scale(pair[0], E4M3, g, la),
            )
    yield ROWWISE_CAST, lambda pair: lambda: cast_by_line(pair[0], E4M3, -1, row)
    yield (
        "cast triton columnwise column-major",
        lambda pair: lambda: cast_by_line(pair[0], E4M3, -2, column),
    )


def _torch_casts(device: torch.device) -> Iterator[Quantity]:
    scale = torch.tensor(0.01, device=device)
    for grain in ("static", "tensorwise", "rowwise"):
        candidate = TorchScaledMM(parse_recipe(f"e4m3/{grain}/fast"))
        given = scale if grain == "static" else None
        yield (
            f"cast eager torch {grain} row-major",
            lambda pair, c=candidate, g=given: lambda: c.prepare(pair[0], Side.A, g),
        )
    if device.type == "cuda":
        static = torch.compile(_saturating_cast, fullgraph=True, dynamic=False)
        rowwise = torch.compile(_rowwise_cast, fullgraph=True, dynamic=False)
        yield "cast compiled torch static row-major", lambda pair: lambda: static(pair[0], scale)
        yield "cast compiled torch rowwise row-major", lambda pair: lambda: rowwise(pair[0])


def _saturating_cast(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Cast as libraries do: Inf and NaN are not told apart, which is cheaper."""
    return (x.float() / scale).clamp(-E4M3.max, E4M3.max).to(E4M3.torch_dtype)


def _rowwise_cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / E4M3.max
    return _saturating_cast(x, scale), scale


def _difference(x: torch.Tensor, w: torch.Tensor) -> dict[str, float]:
    """Return how far products are from float64 of what they saw: that the right thing is timed."""
    rows = slice(0, 64)
    found = {}
    for grain in ("tensorwise", "rowwise"):
        candidate = TritonScaledMM(parse_recipe(f"e4m3/{grain}/fast"))
        a, b = candidate.prepare(x, Side.A), candidate.prepare(w.mT, Side.B)
        out = candidate.run(a, b, torch.bfloat16)[rows].double()
        exact = a.dequantized()[rows] @ b.dequantized()
        found[grain] = float((out - exact).norm() / exact.norm())
    bf16 = functional.linear(x, w)[rows].double()
    exact = x[rows].double() @ w.double().mT
    found["bf16"] = float((bf16 - exact).norm() / exact.norm())
    return found


def _speedups(times: dict[str, dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return compiled BF16's time over each FP8 product's: alone, and with a cast of x."""

    def of(name: str) -> float | None:
        time_us: float | None = times.get(name, {}).get("median_us")
        return time_us

    base = of(COMPILED_BF16)
    found: dict[str, dict[str, float | None]] = {}
    for name in times:
        if not name.startswith(("product torch.scaled_mm", "product triton")):
            continue
        product = of(name)
        casts = {
            "alone": 0.0,
            "with static cast": of(STATIC_CAST),
            "with rowwise cast": of(ROWWISE_CAST),
        }
        found[name] = {
            said: None
            if base is None or product is None or cast_us is None
            else round(base / (product + cast_us), 3)
            for said, cast_us in casts.items()
        }
    return found


def _print_table(result: dict[str, Any]) -> None:
    print(f"{result['m']} x {result['n']} x {result['k']}", file=sys.stderr)
    for name, time_us in result["times_us"].items():
        if "error" in time_us:
            print(f"  {name:48} {time_us['error']}", file=sys.stderr)
            continue
        print(
            f"  {name:48} {time_us['median_us']:9.2f} us"
            f"  [{time_us['p10_us']:.2f}, {time_us['p90_us']:.2f}]",
            file=sys.stderr,
        )


def _copies(footprint_bytes: int, device: torch.device) -> int:
    """Return how many copies of FP8 operands rotate, so that none is found in the L2 cache."""
    if device.type == "cpu":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(MOST_COPIES, -(-2 * cache // footprint_bytes) + 1))


def _times(
    calls: list[Callable[[], object]], seconds: float, device: torch.device
) -> dict[str, Any]:
    """Return median, quantiles and number of repetitions of one call, in microseconds."""
    for call in (calls * 3)[: max(3, len(calls))]:
        call()
    if device.type == "cpu":
        start = time.perf_counter()
        calls[0]()
        return _summary([(time.perf_counter() - start) * 1e6])
    torch.cuda.synchronize()
    rounds = -(-CALLS_PER_GRAPH // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * rounds:
            call()
    graph.replay()
    found: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(found) < REPLAYS and (not found or time.perf_counter() < deadline):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return _summary(found)


def _summary(times_us: list[float]) -> dict[str, Any]:
    ordered = sorted(times_us)
    last = len(ordered) - 1
    return {
        "median_us": round(statistics.median(ordered), 2),
        "p10_us": round(ordered[round(0.1 * last)], 2),
        "p90_us": round(ordered[round(0.9 * last)], 2),
        "repetitions": len(ordered),
    }


def _clocks() -> str | None:
    """Return clocks, power and temperature as nvidia-smi has them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    fields = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,temperature.gpu"
    done = subprocess.run(
        [tool, f"--query-gpu={fields}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else None


if __name__ == "__main__":
    main()
