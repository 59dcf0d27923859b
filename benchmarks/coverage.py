"""Does the recorder see every GEMM? Its sites against a count that shares no code with it.

    ./dev bench coverage [--quick] [--out docs]

For every model of ``coverage_models`` one training step is counted twice: by a dispatch mode of a
few lines, with FLOPs from formulas of its own, and by torch.profiler, which hangs on another part
of PyTorch. The same step is then recorded, and the executions of the recorded sites are compared,
operator by operator. ``coverage.md`` and ``coverage.json`` are written to ``--out``. The exit code
is 1 if anything is missing, double or misnamed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))

from coverage_models import CASES, Case, everything, quiet
from coverage_scripts import SCRIPTS, run_plainly, run_recorded

from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.recording import Schedule, record

BATCH = 24

# The independent count


def _matrix(first: int) -> Callable[[tuple[Any, ...]], list[float]]:
    return lambda args: [2.0 * args[first].numel() * args[first + 1].shape[-1]]


def _vector(first: int) -> Callable[[tuple[Any, ...]], list[float]]:
    return lambda args: [2.0 * args[first].numel()]


def _convolution(x: Any, w: Any, out: Any, transposed: bool, calls: int) -> list[float]:
    pixels = x if transposed else out
    return [2.0 * x.shape[0] * math.prod(pixels.shape[2:]) * w.numel()] * calls


def _convolution_flops(args: tuple[Any, ...], out: Any) -> list[float]:
    # Each weight meets each position once; a group's weights hold only its own channels.
    return _convolution(args[0], args[1], out, args[6], 1)


def _convolution_backward_flops(args: tuple[Any, ...], out: Any) -> list[float]:
    return _convolution(args[1], args[2], args[0], args[7], sum(args[10][:2]))


def _attention(q: Any, k: Any, products: int) -> list[float]:
    return [2.0 * products * q.numel() * k.shape[-2]]


def _lstm(args: tuple[Any, ...], times: int) -> list[float]:
    steps, rows = args[0].shape[:2]
    return [2.0 * times * steps * rows * (args[1].numel() + args[2].numel())]


def _trilinear(args: tuple[Any, ...], out: Any) -> list[float]:
    sizes: dict[int, int] = {}
    for x, expanded in zip(args[:3], args[3:6], strict=True):
        axes = [axis for axis in range(x.ndim + len(expanded)) if axis not in expanded]
        sizes.update(zip(axes, x.shape, strict=True))
    return [2.0 * math.prod(sizes.values())]


COUNTED: dict[str, Callable[[tuple[Any, ...], Any], list[float]]] = {
    "aten.mm.default": lambda args, out: _matrix(0)(args),
    "aten.bmm.default": lambda args, out: _matrix(0)(args),
    "aten.addmm.default": lambda args, out: _matrix(1)(args),
    "aten.baddbmm.default": lambda args, out: _matrix(1)(args),
    "aten.addbmm.default": lambda args, out: _matrix(1)(args),
    "aten.mv.default": lambda args, out: _vector(0)(args),
    "aten.addmv.default": lambda args, out: _vector(1)(args),
    "aten.dot.default": lambda args, out: _vector(0)(args),
    "aten.convolution.default": _convolution_flops,
    "aten.convolution_backward.default": _convolution_backward_flops,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": (
        lambda args, out: _attention(args[0], args[1], 2)
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": (
        lambda args, out: _attention(args[1], args[2], 5)
    ),
    "aten.mkldnn_rnn_layer.default": lambda args, out: _lstm(args, 1),
    "aten.mkldnn_rnn_layer_backward.default": lambda args, out: _lstm(args, 2),
    "aten._trilinear.default": _trilinear,
}
"""FLOPs of every product that a call holds."""

SUSPICIOUS = ("mm", "matmul", "conv", "attention", "rnn", "lstm", "gru", "linear", "dot", "mv")
HARMLESS = ("thnn_fused", "aten._cudnn_rnn_flatten_weight", "aten.mul", "upsample")
"""Names that a product could hide behind: met without a formula, they end the count."""


class Counting(TorchDispatchMode):
    """Counts products and their FLOPs by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Run and count."""
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if name in COUNTED:
            each = COUNTED[name](args, out)
            self.calls[name] += len(each)
            self.flops[name] += sum(each)
        elif any(word in name for word in SUSPICIOUS) and not name.startswith(HARMLESS):
            raise AssertionError(f"{name} looks like a product, and there is no formula for it")
        return out


def counted(case: Case) -> tuple[Counter[str], Counter[str]]:
    """Return calls and FLOPs by operator of one step."""
    with Counting() as count:
        case.step()
    return count.calls, count.flops


def profiled(case: Case) -> Counter[str]:
    """Return calls by operator of one step as torch.profiler sees them.

    Calls inside of other counted calls are left out, such as the products of which a CPU makes an
    addbmm. Convolutions of backward count once here.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        case.step()
    names = {name.split(".")[1]: name for name in COUNTED}
    found: Counter[str] = Counter()
    for event in profile.events():
        name = names.get(event.name.removeprefix("aten::"))
        parent = event.cpu_parent
        while name is not None and parent is not None:
            if parent.name.removeprefix("aten::") in names:
                name = None
            parent = parent.cpu_parent if parent is not None else None
        if name is not None:
            found[name] += 1
    return found


# The recorder


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found for one model.

    Attributes:
        model: Its name.
        library: Where it comes from.
        sites: Distinct sites recorded.
        executions: Their executions.
        calls: Products counted independently.
        profiled: Calls counted by torch.profiler; a backward convolution is one of them. None of
            scripts.
        flops: FLOPs counted independently.
        seen: FLOPs of sites recorded and judged.
        not_judged: FLOPs of sites without errors, by reason.
        repeated: FLOPs of further executions, by reason.
        unseen: FLOPs of no site, by reason.
        problems: What is missing, double or misnamed.
    """

    model: str
    library: str
    sites: int
    executions: int
    calls: int
    profiled: int | None
    flops: float
    seen: float
    not_judged: dict[str, float]
    repeated: dict[str, float]
    unseen: dict[str, float]
    problems: tuple[str, ...]


def recorded(case: Case, path: Path) -> Trace:
    """Record one step of a case."""
    with quiet(), record(case.model, path, schedule=Schedule.always(), moments_width=0) as recorder:
        case.step()
        recorder.step()
    return Trace.open(path)


def compare(make: Callable[[int], Case], batch: int) -> Row:
    """Count a step of a model and record it.

    Args:
        make: Makes the case; called once for counting and once for recording.
        batch: Number of examples.
    """
    case = _made(make, batch, compiles=False)
    calls, flops = counted(case)
    by_profiler = profiled(case)
    subject = _made(make, batch, compiles=True)
    with tempfile.TemporaryDirectory() as directory:
        trace = recorded(subject, Path(directory) / "run")
        sites = _products(trace)
        problems = _name_problems(subject, sites)
        return _row(subject.name, subject.library, trace, calls, flops, by_profiler, problems)


def compare_script(name: str, library: str, text: str) -> Row:
    """Count the one step of a script that knows of no recorder, and run ``loka record`` on it."""
    with tempfile.TemporaryDirectory() as directory:
        (script := Path(directory) / "train.py").write_text(text, encoding="utf-8")
        with Counting() as count:
            run_plainly(script)
        trace = run_recorded(script)
        steps = trace.steps.num_rows
        problems = [] if steps == 1 else [f"{steps} steps recorded of one"]
        return _row(name, library, trace, count.calls, count.flops, None, problems)


def _products(trace: Trace) -> list[dict[str, Any]]:
    return [row for row in trace.sites.to_pylist() if row["role"] != "norm"]


def _row(
    name: str,
    library: str,
    trace: Trace,
    calls: Counter[str],
    flops: Counter[str],
    by_profiler: Counter[str] | None,
    problems: list[str],
) -> Row:
    sites = _products(trace)
    steps = trace.steps.to_pylist()[0]
    problems = [
        *_count_problems(sites, calls, flops, by_profiler),
        *_step_problems(steps, sites, sum(flops.values())),
        *problems,
    ]
    return Row(
        model=name,
        library=library,
        sites=len({row["site"] for row in sites}),
        executions=sum(row["executions"] for row in sites),
        calls=sum(calls.values()),
        profiled=None if by_profiler is None else sum(by_profiler.values()),
        flops=sum(flops.values()),
        seen=steps["gemm_flops_seen"],
        not_judged=_reasons(steps["not_judged_reason"]),
        repeated=_reasons(steps["repeated_reason"]),
        unseen=_reasons(steps["unseen_reason"]),
        problems=tuple(problems),
    )


def _made(make: Callable[..., Case], batch: int, *, compiles: bool) -> Case:
    torch.manual_seed(0)
    return make(batch, compiles=compiles) if make is everything else make(batch)


def _reasons(text: str | None) -> dict[str, float]:
    return json.loads(text) if text else {}


def _count_problems(
    sites: list[dict[str, Any]],
    calls: Counter[str],
    flops: Counter[str],
    by_profiler: Counter[str] | None,
) -> list[str]:
    found: Counter[str] = Counter()
    found_flops: Counter[str] = Counter()
    for row in sites:
        found[row["op"]] += row["executions"]
        found_flops[row["op"]] += row["executions"] * row["flops"]
    problems = []
    for op in sorted(set(found) | set(calls)):
        if found[op] != calls[op]:
            problems.append(f"{op}: {found[op]} executions recorded, {calls[op]} counted")
        elif not math.isclose(found_flops[op], flops[op], rel_tol=1e-12):
            problems.append(f"{op}: {found_flops[op]:g} FLOPs recorded, {flops[op]:g} counted")
        if by_profiler is None:
            continue
        both = op == "aten.convolution_backward.default"  # one call, up to two products
        least = math.ceil(calls[op] / 2) if both else calls[op]
        if not least <= by_profiler[op] <= calls[op]:
            problems.append(f"{op}: {by_profiler[op]} calls profiled, {calls[op]} counted")
    return problems


def _step_problems(step: dict[str, Any], sites: list[dict[str, Any]], flops: float) -> list[str]:
    problems = []
    if step["status"] != "recorded":
        problems.append(f"the step is {step['status']}: {step['reason']}")
    if step["gemm_flops_unseen"]:
        problems.append(f"unseen: {step['unseen_reason']}")
    parts = ("seen", "not_judged", "repeated", "unseen")
    total = sum(step[f"gemm_flops_{part}"] for part in parts)
    if not math.isclose(total, flops, rel_tol=1e-12):
        problems.append(f"the step's FLOPs add up to {total:g}, {flops:g} counted")
    return problems


def _name_problems(case: Case, sites: list[dict[str, Any]]) -> list[str]:
    def plain(name: str) -> str:
        return ".".join(part for part in name.split(".") if part != "_orig_mod")

    modules = {plain(name) or "(root)" for name, _ in case.model.named_modules()}
    parameters = {plain(name) for name, _ in case.model.named_parameters()}
    problems = [f"{row['site']}: no such module" for row in sites if row["fqn"] not in modules]
    problems += [
        f"{row['site']}: no such parameter {row['weight']}"
        for row in sites
        if row["weight"] is not None and row["weight"] not in parameters
    ]
    if case.weights is not None:
        found = {row["site"]: row["weight"] for row in sites if row["role"] == "fwd"}
        found = {site: weight for site, weight in found.items() if weight is not None}
        for site in sorted(set(found) | set(case.weights)):
            said, expected = found.get(site), case.weights.get(site)
            if said != expected:
                problems.append(f"{site} multiplies {said}; by hand: {expected}")
    return problems


# The report


def table(rows: list[Row], scripts: list[Row], batch: int) -> str:
    """Return the page of the documentation."""
    lines = [
        "# What the recorder sees",
        "",
        "Written by `./dev bench coverage`; change nothing here by hand. One training step of each "
        f"model with {batch} examples on a CPU, torch {torch.__version__.split('+')[0]}. "
        "*Calls* are products counted without the recorder, forward and backward: by a dispatch "
        "mode with formulas of its own, and, without FLOPs, by `torch.profiler`. *Executions* are "
        "those of the recorded sites. Both agree for every operator, in number and in FLOPs, and "
        "every site carries the path of an existing module and parameter.",
        "",
        *_lines(rows),
        "",
        "## Through `loka record`",
        "",
        "Scripts of one training step that know nothing of the recorder: counted by the same mode "
        "while they run plainly, then recorded by `loka record script.py`, in their own process.",
        "",
        *_lines(scripts),
    ]
    lines += ["", "## Why work is not judged, or counted as repeated", ""]
    for row in rows:
        for kind, reasons in (("not judged", row.not_judged), ("repeated", row.repeated)):
            lines += [
                f"- {row.model} ({row.library}), {kind}: {reason}: {100 * flops / row.flops:.3g} %"
                for reason, flops in sorted(reasons.items(), key=lambda item: -item[1])
            ]
    broken = [row for row in (*rows, *scripts) if row.problems]
    if broken:
        lines += ["", "## Problems", ""]
        lines += [f"- {row.model}: {problem}" for row in broken for problem in row.problems]
    return "\n".join(lines) + "\n"


def _lines(rows: list[Row]) -> list[str]:
    lines = [
        "| model | library | sites | executions | calls | MFLOP | seen | not judged | repeated | "
        "unseen |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shares = [row.seen, *(sum(x.values()) for x in (row.not_judged, row.repeated, row.unseen))]
        percent = " | ".join(f"{100 * share / row.flops:.3g} %" for share in shares)
        lines.append(
            f"| {row.model} | {row.library} | {row.sites} | {row.executions} | {row.calls} | "
            f"{row.flops / 1e6:.3g} | {percent} |"
        )
    return lines


def main() -> int:
    """Compare all models, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--quick", action="store_true", help="batches of 6; nothing is written")
    arguments = parser.parse_args()
    batch = 6 if arguments.quick else arguments.batch
    rows = [compare(make, batch) for make in CASES]
    scripts = [compare_script(name, *what) for name, what in SCRIPTS.items()]
    page = table(rows, scripts, batch)
    print(page)
    if not arguments.quick:
        (arguments.out / "coverage.md").write_text(page)
        facts = {"batch": batch, "torch": torch.__version__, "models": [vars(r) for r in rows]}
        facts["scripts"] = [vars(r) for r in scripts]
        (arguments.out / "coverage.json").write_text(json.dumps(facts, indent=1) + "\n")
    return int(any(row.problems for row in (*rows, *scripts)))


if __name__ == "__main__":
    sys.exit(main())
