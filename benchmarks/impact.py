"""Whether predicted impact is right: against models of which one product is replaced.

    ./dev bench impact [--quick] [--only CASE,...] [--out benchmarks/results/impact.json]

Trains small click models, records their last steps, and compares what the recorder predicts with
what the emulation of one product does on fresh rows in float64: to the mean loss for forward
products, to the gradients of weights and tables for backward ones. Prints one JSON object as the
last line.

``cells`` counts forward cells (site x recipe) whose measured change of the loss exceeds three
standard errors and that the recorder did not call beyond validity; ``unresolved`` the others that
have a prediction, ``resolved_gains`` those whose loss went down by as much. ``spearman``, ``slope``
(of log predicted on log measured) and ``median_ratio`` compare the predicted impact with the
measured; ``relative_error_spearman`` is what the error of the product alone would have ranked.
``with_beyond_validity`` holds the same with the flagged cells, ``raw`` with first and second order
averaged over steps and not shrunk. ``gradient_bias`` and ``gradient_noise`` do so for the gradient
cells, by role (``upstream`` is dgrad, grad_a and grad_b); ``gradient_bias_spearman`` and so on are
those of all roles. ``models`` and ``rows`` have it by model and by cell.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from impact_gradients import measure_gradients, predicted_gradients
from impact_losses import measure_losses, predicted_losses
from impact_models import Case, Size, batches, cases, train
from scipy.stats import spearmanr

from loka_toolkit.artifacts.trace import Trace

FULL = Size(train=3000, record=48, fresh_batches=150, gradient_batches=48)
QUICK = Size(train=200, record=8, fresh_batches=12, gradient_batches=3)
QUICK_CASES = ("mlp", "deepctr-dcn-sum", "accumulation")

RESOLVED = 3.0
"""Standard errors from which on a measured change counts."""
SMALLEST_BIAS = 1e-7
"""A bias below this is rounding: a product that contracts over one element has no other."""

Row = dict[str, Any]


def run(case: Case, folder: Path, size: Size) -> list[Row]:
    """Train, record, predict and measure one case; return its cells."""
    path = folder / case.name
    start = time.perf_counter()
    model = train(case, path, size)
    trace = Trace.open(path)
    sites = [row for row in trace.sites.to_pylist() if row["role"] == "fwd"]
    steps = trace.steps.to_pylist()
    trained = time.perf_counter()
    forward = predicted_losses(trace)
    fresh = batches(case, size.fresh_batches, seed=2)
    measure_losses(case, model, forward, sites, fresh)
    measured = time.perf_counter()
    backward = predicted_gradients(trace)
    measure_gradients(
        case,
        model,
        backward,
        [row["site"].rpartition(":")[0] for row in sites],
        [row["weight"] for row in sites if row["weight"] is not None],
        batches(case, size.gradient_batches, seed=3),
        steps[-1]["loss_scale"] if case.autocast is not None else 1.0,
    )
    done = time.perf_counter()
    print(
        f"{case.name}: trained {trained - start:.0f} s, losses {measured - trained:.0f} s, "
        f"gradients {done - measured:.0f} s; units seen: {steps[-1]['examples']} examples, "
        f"{steps[-1]['reduction']}, scale {steps[-1]['loss_scale']:g}",
        file=sys.stderr,
        flush=True,
    )
    return [{"model": case.name, **row} for row in forward + backward]


def is_forward(row: Row) -> bool:
    """Whether a cell is about the loss."""
    return bool(row["site"].endswith(":fwd"))


def compared(predicted: list[float], measured: list[float]) -> Row:
    """Return how positive predictions agree with positive measurements."""
    p, m = np.asarray(predicted), np.asarray(measured)
    found: Row = {"cells": len(p)}
    if len(p) < 3:
        return found
    found["spearman"] = float(spearmanr(p, m).statistic)
    found["slope"] = float(np.polyfit(np.log(m), np.log(p), 1)[0])
    found["median_ratio"] = float(np.median(p / m))
    found["worst_ratio"] = float(np.exp(np.abs(np.log(p / m)).max()))
    found["decades"] = float(np.log10(m.max() / m.min()))
    return found


def losses(rows: list[Row], key: str = "predicted", *, flagged: bool = False) -> Row:
    """Return how forward cells agree."""
    known = [r for r in rows if is_forward(r) and r[key] is not None]
    known = [r for r in known if flagged or r["beyond_validity"] < 0.5]
    resolved = [r for r in known if r["measured"] > RESOLVED * r["measured_se"]]
    gains = [r for r in known if -r["measured"] > RESOLVED * r["measured_se"]]
    positive = [r for r in resolved if r[key] > 0]
    found = compared([r[key] for r in positive], [r["measured"] for r in positive])
    found["unresolved"] = len(known) - len(resolved) - len(gains)
    found["resolved_gains"] = len(gains)
    found["predicted_not_positive"] = len(resolved) - len(positive)
    if len(positive) >= 3:
        errors, changes = [[r[k] for r in positive] for k in ("relative_error", "measured")]
        found["relative_error_spearman"] = float(spearmanr(errors, changes).statistic)
    return found


def gradients(rows: list[Row], roles: tuple[str, ...]) -> tuple[Row, Row]:
    """Return how bias and noise of gradient cells of some roles agree.

    A bias counts where its measurement is resolved. Ranks are compared with their sign; magnitudes
    where the signs agree, and where they do not is counted.
    """
    chosen = [r for r in rows if r["site"].rpartition(":")[2] in roles and r["steps"] > 1]
    resolved = [
        r
        for r in chosen
        if abs(r["bias_measured"]) > RESOLVED * r["bias_measured_se"]
        and abs(r["bias_measured"]) > SMALLEST_BIAS
    ]
    same = [r for r in resolved if r["bias_predicted"] * r["bias_measured"] > 0]
    bias = compared(
        [abs(r["bias_predicted"]) for r in same], [abs(r["bias_measured"]) for r in same]
    )
    if len(resolved) >= 3:
        signed = [[r[k] for r in resolved] for k in ("bias_predicted", "bias_measured")]
        bias["signed_spearman"] = float(spearmanr(*signed).statistic)
    bias["unresolved"] = len(chosen) - len(resolved)
    bias["other_sign"] = len(resolved) - len(same)
    deviations = [
        (r["bias_predicted"] - r["bias_measured"])
        / np.hypot(r["bias_predicted_se"], r["bias_measured_se"])
        for r in chosen
        if r["bias_predicted_se"] and abs(r["bias_measured"]) > SMALLEST_BIAS
    ]
    if deviations:
        bias["median_deviation_in_standard_errors"] = float(np.median(np.abs(deviations)))
    chosen = [r for r in chosen if r["noise_predicted"] is not None]
    noisy = [r for r in chosen if r["noise_predicted"] and r["noise_measured"] > SMALLEST_BIAS]
    noise = compared([r["noise_predicted"] for r in noisy], [r["noise_measured"] for r in noisy])
    return bias, noise


def summary(rows: list[Row], names: list[str]) -> Row:
    """Return the figures of a run."""
    found = losses(rows)
    found["unpredicted"] = sum(is_forward(r) and r["predicted"] is None for r in rows)
    found["with_beyond_validity"] = losses(rows, flagged=True)
    found["raw"] = losses(rows, "predicted_raw")
    upstream = ("dgrad", "grad_a", "grad_b")
    roles = {"wgrad": ("wgrad",), "upstream": upstream, "all": ("wgrad", *upstream)}
    by_role = {name: gradients(rows, chosen) for name, chosen in roles.items()}
    found["gradient_cells"] = by_role["all"][1]["cells"]
    found["gradient_bias"] = {name: bias for name, (bias, _) in by_role.items()}
    found["gradient_noise"] = {name: noise for name, (_, noise) in by_role.items()}
    for what in ("bias", "noise"):
        for key in ("cells", "spearman", "signed_spearman", "slope", "median_ratio"):
            if key in found[f"gradient_{what}"]["all"]:
                found[f"gradient_{what}_{key}"] = found[f"gradient_{what}"]["all"][key]
    found["gradient_null"] = sum(not is_forward(r) and not r["steps"] for r in rows)
    found["gradient_noise_null"] = sum(
        not is_forward(r) and r["steps"] > 0 and r["noise_predicted"] is None for r in rows
    )
    found["models"] = {}
    for name in names:
        own = [row for row in rows if row["model"] == name]
        bias, noise = gradients(own, roles["all"])
        found["models"][name] = {
            **losses(own),
            "gradient_bias": bias,
            "gradient_noise": noise,
        }
    return found


def rounded(value: Any) -> Any:
    """Return a JSON value whose numbers have four significant digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a minute instead of a quarter hour")
    parser.add_argument("--only", help="names of cases, separated by commas")
    parser.add_argument("--out", type=Path, help="write the JSON object here too")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    only = arguments.only.split(",") if arguments.only else None
    wanted = only or (QUICK_CASES if arguments.quick else None)
    warnings.filterwarnings("ignore")  # deepctr-torch's, on import
    torch.set_num_threads(1)
    start = time.perf_counter()
    rows: list[Row] = []
    names = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases():
            if wanted is None or case.name in wanted:
                names.append(case.name)
                rows += run(case, Path(scratch), size)
    result = {
        **summary(rows, names),
        "seconds": time.perf_counter() - start,
        "quick": arguments.quick,
        "torch": torch.__version__,
    }
    result["rows"] = rows
    result = rounded(result)
    if arguments.out is not None:
        lines = ",\n    ".join(json.dumps(row) for row in result.pop("rows"))
        head = json.dumps(result, indent=2).rstrip("}\n")
        arguments.out.write_text(f'{head},\n  "rows": [\n    {lines}\n  ]\n}}\n')
    result.pop("rows", None)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
