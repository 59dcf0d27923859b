"""Synthetic artifacts, made through their own dataclasses, and a headless browser."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loka_toolkit.artifacts import dispatch_table as dt
from loka_toolkit.artifacts import map_facts as mf
from loka_toolkit.artifacts import replay_results as rr
from loka_toolkit.artifacts import safety_map as sm
from loka_toolkit.artifacts import storage
from loka_toolkit.artifacts import trace as tr
from loka_toolkit.environment import Environment
from loka_toolkit.numerics.posterior import share_limit_db
from loka_toolkit.numerics.recipes import DEFAULT_RECIPE_NAMES, parse_recipe
from loka_toolkit.numerics.tolerance import REASONS, Tolerance

MODULES = (
    ("query_tower.0", "Linear", (4096, 256, 416)),
    ("query_tower.2", "Linear", (4096, 128, 256)),
    ("item_tower.0", "Linear", (4096, 256, 429)),
    ("item_tower.2", "Linear", (4096, 128, 256)),
    ("cross.layers.0", "CrossLayer", (4096, 845, 845)),
    ("head", "Linear", (4096, 1, 39)),
)
ENVIRONMENT = Environment(
    chip="H200",
    capability="9.0",
    driver="570.86.15",
    cuda="13.0",
    python="3.12.3",
    platform="Linux-x86_64",
    loka_toolkit="0.1.0",
    libraries={"torch": "2.11.0", "numpy": "2.5.0"},
)
STEPS = tuple(range(20, 820, 20))


def _level(site: int, role: str, recipe: str) -> float:
    """Return a believable mean SQNR: E4M3 near 28 dB, E5M2 near 22, the first site far worse."""
    base = 28.0 if recipe.startswith("e4m3/") else 23.0
    base += 0.6 if "rowwise" in recipe else 0.0
    bad = 14.0 if site == 0 and ("rowwise" not in recipe or role == "fwd") else 0.0
    unclear = 7.0 if site == 2 and role == "wgrad" else 0.0
    return base - bad - unclear - 0.4 * (site % 5)


def _posterior(mu: float, sd: float, limit: float, steps: int = 40) -> sm.Posterior:
    return sm.Posterior(
        mu=mu,
        kappa=float(steps),
        alpha=steps / 2 + 2,
        beta=(steps / 2 + 1) * sd**2,
        steps=float(steps),
        outlying_steps=1,
        limit=limit,
    )


def build_cell(
    site: int,
    fqn: str,
    module: str,
    dims: tuple[int, int, int],
    role: str,
    recipe: str,
    flops: float,
) -> sm.Cell:
    tolerance = Tolerance()
    level = _level(site, role, recipe)
    if level < 17:
        verdict, p = sm.Verdict.UNSAFE, (0.97, 0.93, 0.999)
    elif level < 22.4:
        verdict, p = sm.Verdict.INSUFFICIENT, (0.04, 0.01, 0.09)
    else:
        verdict, p = sm.Verdict.SAFE, (0.002, 0.0004, 0.006)
    if site == 3 and "rowwise" not in recipe:
        p = (p[0] / 2, p[1] / 2, p[2] / 2)
    m, n, k = dims
    forward = role == "fwd"
    safe = verdict is sm.Verdict.SAFE
    speedup = 1.31 if k >= 400 else 0.83
    reason = {
        sm.Verdict.SAFE: "q95 of the exceedance rate is within 5 %, impact within the allotment",
        sm.Verdict.UNSAFE: "the worst column group of x loses 93 % of its elements to underflow",
        sm.Verdict.INSUFFICIENT: "the interval of the exceedance rate straddles 5 %",
    }[verdict]
    underflow_limit = share_limit_db(tolerance.underflow_share_worst_group)
    return sm.Cell(
        site=f"{fqn}#0:{role}", fqn=fqn, call=0, role=role, recipe=recipe, module_type=module,
        weight=f"{fqn}.weight", dispatchable=True, batch=1, m=m, n=n, k=k, dtype="float32",
        flops_share=flops, evidence_steps=len(STEPS), evidence_effective=31.5,
        sqnr_db=level, sqnr_db_lo=level - 1.4, sqnr_db_hi=level + 1.4, row_sqnr_db=level - 3,
        underflow_share_worst_group=0.93 if level < 17 else 0.012,
        underflow_worst_group="x[0:16]" if level < 17 else None,
        saturation_share=0.0, p_exceed=p[0], p_exceed_lo=p[1], p_exceed_hi=p[2],
        p_exceed_mcse=1e-4, p_unsafe=p[0], binding_criterion="underflow" if level < 17 else "sqnr",
        impact=3e-6 if forward else None, impact_lo=0.0 if forward else None,
        impact_hi=1e-5 if forward else None, impact_allotment=2e-4 * flops,
        impact_reason=None, gradient_bias=None if forward else 4e-4,
        gradient_noise_ratio=None if forward else 0.003, drift_db_per_1000_steps=-0.2,
        verdict=verdict, reason=reason, fast=safe and speedup > 1.05, speedup=speedup,
        speedup_evidence=sm.SpeedEvidence.PREDICTED,
        posteriors={
            "sqnr": _posterior(level, 0.7, tolerance.sqnr_db),
            "row_sqnr": _posterior(level - 3, 0.9, tolerance.row_sqnr_db_p05),
            "underflow": _posterior(0.4 if level < 17 else 19.0, 0.2, underflow_limit),
        },
    )  # fmt: skip


def build_facts(recipes: tuple[str, ...], layers: list[str], **changes: Any) -> mf.MapFacts:
    facts = mf.MapFacts(
        created="2025-01-02T03:04:05Z",
        environment=msgspec.structs.replace(ENVIRONMENT, chip="cpu", capability=None, driver=None),
        trace_environment=ENVIRONMENT,
        trace_digest="0" * 64,
        config={"seed": 0, "chains": 4},
        tolerance=Tolerance(),
        tolerance_reasons=dict(REASONS),
        recipes=recipes,
        baseline_loss=0.45231,
        false_discovery_rate=0.0021,
        health=mf.FitHealth(
            healthy=True, problems=(), max_r_hat=1.0031, min_ess=1321.0, divergences=0,
            min_bfmi=0.91, chains=4, draws=1000, seconds=14.2,
        ),
        hyperparameters=tuple(
            mf.Hyperparameter(name, 1.2, 0.3, 0.7, 1.7, 1.001 + i / 1000, 2100.0 - i, 1800.0)
            for i, name in enumerate(("mu_role[fwd]", "tau_site", "nu", "sigma_module[Linear]"))
        ),
        scales=tuple(
            mf.OperandScale(
                layer=layer, operand=operand, amax=4.2, log2_amax_sd=0.31, headroom=8.0,
                scale={"e4m3": 4.2 * 8 / 448, "e5m2": 4.2 * 8 / 57344},
                overflow_probability={"e4m3": 1.3e-9, "e5m2": 1.3e-9}, steps=40,
            )
            for layer in layers
            for operand in ("x", "w", "g")
        ),
        coverage=mf.Coverage(
            flops_seen=9.4e11, flops_unseen=0.6e11,
            unseen_reasons={"aten._scaled_dot_product_attention": 0.5e11, "custom op": 0.1e11},
            steps_recorded=40, steps_skipped=2,
        ),
        alerts=("head#0: N = 1 is not a multiple of 16; the kernels pad it.",),
    )  # fmt: skip
    return msgspec.structs.replace(facts, **changes)


@pytest.fixture(scope="session")
def make_map() -> Callable[..., sm.SafetyMap]:
    """Return a builder: ``modules`` of (fqn, module type, (T, O, I)), ``recipes``, facts."""

    def build(
        modules: tuple[tuple[str, str, tuple[int, int, int]], ...] = MODULES,
        recipes: tuple[str, ...] = DEFAULT_RECIPE_NAMES,
        **facts: Any,
    ) -> sm.SafetyMap:
        work = [3.0 * t * o * i for _, _, (t, o, i) in modules]
        cells = []
        for index, (fqn, module, (tokens, out, width)) in enumerate(modules):
            dims = {"fwd": (tokens, out, width), "dgrad": (tokens, width, out),
                    "wgrad": (out, width, tokens)}  # fmt: skip
            for role, shape in dims.items():
                flops = work[index] / 3 / sum(work)
                cells += [build_cell(index, fqn, module, shape, role, r, flops) for r in recipes]
        layers = [f"{fqn}#0" for fqn, _, _ in modules]
        return sm.SafetyMap(tuple(cells), build_facts(recipes, layers, **facts))

    return build


def _histogram(values: np.ndarray) -> list[int]:
    magnitudes = np.abs(values[np.isfinite(values) & (values != 0)])
    bins = np.floor((np.log2(magnitudes) - tr.HISTOGRAM_LOG2_MIN) * 2).astype(int)
    return np.bincount(bins.clip(0, 255), minlength=tr.HISTOGRAM_BINS).tolist()


def _operand_row(step: int, site: str, operand: str, values: np.ndarray) -> dict[str, Any]:
    def quantiles(axis: int) -> list[float]:
        return np.quantile(np.abs(values).max(axis=axis), tr.AMAX_QUANTILES).tolist()

    return {
        "step": step, "rank": 0, "site": site, "operand": operand, "dtype": "float32",
        "numel": values.size, "width": values.shape[1], "mean": float(values.mean()),
        "variance": float(values.var()), "amax": float(np.abs(values).max()),
        "smallest_nonzero": float(np.abs(values[values != 0]).min()),
        "zero_share": float((values == 0).mean()), "nonfinite_count": 0,
        "histogram_log2": _histogram(values), "row_amax_quantiles": quantiles(1),
        "column_amax_quantiles": quantiles(0), "block128_amax_quantiles": quantiles(1),
    }  # fmt: skip


def _error_row(rng: np.random.Generator, step: int, cell: sm.Cell) -> dict[str, Any]:
    recipe = parse_recipe(cell.recipe)
    level = cell.sqnr_db + 0.7 * rng.standard_normal()
    rowwise = recipe.scaling == "rowwise"
    return {
        "step": step, "rank": 0, "site": cell.site, "recipe": cell.recipe,
        "relative_frobenius": 10 ** (-level / 20), "sqnr_db": level,
        "row_sqnr_db_p05": level - 3, "element_error_median": 0.03, "element_error_mean": 0.4,
        "underflow_share": 0.01,
        "underflow_share_worst_group": float(
            np.clip(cell.underflow_share_worst_group * (1 + 0.05 * rng.standard_normal()), 0, 1)
        ),
        "underflow_worst_group": cell.underflow_worst_group, "saturation_share": 0.0,
        "scale_a": None if rowwise else 4.0 / 448, "scale_b": None if rowwise else 0.3 / 448,
        "impact_first_order": 1e-7, "impact_second_order": 1e-7, "impact_standard_error": None,
        "impact_status": "ok", "impact_reason": None, "gradient_bias": None,
        "gradient_noise_ratio": None, "gradient_reason": None, "sampled_rows": 256,
        "sampled_columns": 128,
    }  # fmt: skip


@pytest.fixture(scope="session")
def make_trace() -> Callable[..., tr.Trace]:
    """Return a builder of a trace on disk that belongs to a map."""

    def build(path: Path, safety: sm.SafetyMap, *, seed: int = 0, steps: tuple[int, ...] = STEPS,
              norms: bool = True, events: tuple[tr.Event, ...] = ()) -> tr.Trace:  # fmt: skip
        rng = np.random.default_rng(seed)
        sites = {cell.site: cell for cell in safety.cells}
        rows: dict[str, list[dict[str, Any]]] = {t.name: [] for t in tr.TABLES}
        for cell in sites.values():
            rows["sites"].append({
                "site": cell.site, "fqn": cell.fqn, "call": cell.call, "role": cell.role,
                "op": "aten.addmm.default", "batch": cell.batch, "m": cell.m, "n": cell.n,
                "k": cell.k, "dtype_a": "float32", "dtype_b": "float32", "dtype_out": "float32",
                "layout_a": "row", "layout_b": "column", "module_type": cell.module_type,
                "weight": cell.weight, "norm_after": None, "dispatchable": True, "first_step": 0,
            })  # fmt: skip
        if norms:
            shape = rows["sites"][0]
            norm = {"role": "norm", "m": 4096, "n": 256, "k": 0, "module_type": "LayerNorm"}
            rows["sites"].append(shape | norm | {"site": "query_tower.1#0:norm",
                                                 "fqn": "query_tower.1"})  # fmt: skip
            sdpa = {"site": "attention#0:fwd", "op": "aten._scaled_dot_product_attention.default"}
            sdpa |= {"dispatchable": False, "not_dispatchable_reason": "fused attention"}
            rows["sites"].append(shape | sdpa)
        for step in steps:
            rows["steps"].append({
                "step": step, "rank": 0, "status": "recorded", "reason": None, "loss": 0.45,
                "mean_loss": 0.45, "examples": 4096, "reduction": "mean", "loss_scale": 1.0,
                "seconds_recording": 0.012, "gemm_flops_seen": 9.4e11, "gemm_flops_unseen": 6e10,
                "unseen_reason": None,
            })  # fmt: skip
            for cell in {c.fqn: c for c in sites.values()}.values():
                width = 39 if cell.fqn == "head" else 117
                x = rng.standard_normal((64, width)) * rng.lognormal(0, 2.2, (1, width))
                x[rng.random(x.shape) < 0.2] = 0.0
                w, g = 0.05 * rng.standard_normal((48, width)), 1e-5 * rng.standard_t(3, (64, 48))
                for role, operand, values in (("fwd", "x", x), ("fwd", "w", w), ("dgrad", "g", g)):
                    site = f"{cell.fqn}#0:{role}"
                    rows["operands"].append(_operand_row(step, site, operand, values))
            if norms:
                spread = 6.0 if step == steps[-1] else 1.0
                values = spread * rng.standard_normal((64, 32))
                rows["operands"].append(_operand_row(step, "query_tower.1#0:norm", "input", values))
            rows["errors"] += [_error_row(rng, step, cell) for cell in safety.cells]
        for schema in tr.TABLES:
            table = storage.table_from_rows(schema, rows[schema.name])
            part = storage.part_path(path / schema.name, 0, 0)
            storage.write_table(part, table, schema, kind=storage.part_kind(schema))
        manifest = tr.Manifest(
            kind=tr.KIND, schema_version=tr.SCHEMA_VERSION, created="2025-01-02T00:00:00Z", rank=0,
            world_size=1, environment=ENVIRONMENT, config={"every": 20}, events=events,
            recipes=safety.facts.recipes,
            status=tr.RunStatus(closed=True, steps_seen=820, steps_recorded=len(steps)),
        )  # fmt: skip
        storage.write_json(path / tr.manifest_name(0), manifest)
        return tr.Trace.open(path)

    return build


@pytest.fixture(scope="session")
def make_replay() -> Callable[..., rr.ReplayResults]:
    def build(safety: sm.SafetyMap, **facts: Any) -> rr.ReplayResults:
        rows = []
        for index, cell in enumerate({c.site: c for c in safety.cells}.values()):
            for candidate, status in (
                ("torch.scaled_mm/e4m3/tensorwise/fast", rr.Status.OK),
                ("emulation/e4m3/rowwise/fast", rr.Status.OK),
                ("fbgemm.rowwise/e4m3/rowwise/fast", rr.Status.KERNEL_ABSENT),
                ("torch.scaled_mm/e4m3/rowwise/fast",
                 rr.Status.UNSUPPORTED if index % 2 else rr.Status.WRONG_NUMERICS),
            ):  # fmt: skip
                good = status is rr.Status.OK
                rows.append(rr.ReplayRow(
                    site=cell.site, fqn=cell.fqn, call=0, role=cell.role, batch=1, m=cell.m,
                    n=cell.n, k=cell.k, dtype="bfloat16", candidate=candidate,
                    library=candidate.split(".")[0].split("/")[0], version="2.11.0",
                    recipe=candidate.partition("/")[2], emulated=candidate.startswith("emulation"),
                    status=status, detail=None if good else "K = 13 is not a multiple of 16",
                    kernel_sqnr_db=120.0 - index if good else None,
                    total_sqnr_db=28.1 if good else None, emulation_sqnr_db=28.2 if good else None,
                    excess_error=1.01 + index / 100 if good else None, draws=3,
                    latency_us=12.5 + index if good else None, latency_us_p10=12.0,
                    latency_us_p90=13.0, cast_a_us=2.0, cast_b_us=1.0, gemm_us=9.0,
                    repetitions=50, inputs="moments", kernel_ran=None, chip="H200",
                    workload_digest=f"{index:064d}",
                ))  # fmt: skip
        values = dict(
            created="2025-01-03T00:00:00Z", environment=ENVIRONMENT,
            trace_digest=safety.facts.trace_digest, config={"draws": 3}, policy="median-of-50",
            policy_description="Median of 50 repetitions after 10 warm-ups, clocks not locked.",
            complete=True,
        )  # fmt: skip
        return rr.ReplayResults(tuple(rows), rr.ReplayFacts(**(values | facts)))

    return build


@pytest.fixture(scope="session")
def make_table() -> Callable[..., dt.DispatchTable]:
    def build(safety: sm.SafetyMap, **changes: Any) -> dt.DispatchTable:
        entries, misses = [], []
        for verdict in safety.site_verdicts():
            fqn, _, rest = verdict.site.rpartition("#")
            call, _, role = rest.partition(":")
            if verdict.verdict is sm.Verdict.SAFE and role != "wgrad":
                evidence = dt.Evidence("safe", 0.002, verdict.recipe or "", "measured", "measured",
                                       1.21, "0" * 64, "measured as faster")  # fmt: skip
                entries.append(dt.Entry(
                    fqn, int(call), role, "m", 1024, 8192, None, 256, 416, 1, "bfloat16",
                    "row,row", "torch.scaled_mm/e4m3/tensorwise/fast", "torch", "2.11.0",
                    "e4m3/tensorwise/fast", "dynamic", None, None, "default", evidence,
                ))  # fmt: skip
            else:
                reason = dt.MissReason.NOT_FASTER if role == "wgrad" else dt.MissReason.UNSAFE
                misses.append(dt.Miss(fqn, int(call), role, reason, "1.02 is below 1.05"))
        return dt.DispatchTable(**({
            "kind": dt.KIND, "schema_version": dt.SCHEMA_VERSION, "created": "2025-01-04T00:00:00Z",
            "chip": "H200", "objective": dt.Objective.SPEED, "environment": ENVIRONMENT,
            "config": {}, "tolerance": Tolerance(), "safety_digest": "1" * 64,
            "replay_digest": None, "validators": (dt.Validator("chip", "H200", True),
                                                  dt.Validator("driver", None, False)),
            "entries": tuple(entries), "layers": (), "misses": tuple(misses),
        } | changes))  # fmt: skip

    return build


@dataclasses.dataclass(frozen=True)
class Artifacts:
    """Artifacts that belong together."""

    safety: sm.SafetyMap
    trace: tr.Trace
    replay: rr.ReplayResults
    table: dt.DispatchTable


@pytest.fixture(scope="session")
def artifacts(
    tmp_path_factory: pytest.TempPathFactory,
    make_map: Callable[..., sm.SafetyMap],
    make_trace: Callable[..., tr.Trace],
    make_replay: Callable[..., rr.ReplayResults],
    make_table: Callable[..., dt.DispatchTable],
) -> Artifacts:
    draft = make_map()
    trace = make_trace(tmp_path_factory.mktemp("artifacts") / "trace", draft)
    safety = make_map(trace_digest=trace.digest)
    return Artifacts(safety, trace, make_replay(safety), make_table(safety))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Return a headless Chromium, or skip where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        pytest.skip("no chromium on PATH: the page is not tried in a browser")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=executable,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-default-apps",
                "--disable-sync",
            ],
        )
        yield browser
        browser.close()
