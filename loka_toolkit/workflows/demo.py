"""The whole road on a small click model: record, analyze, replay, dispatch, train on, report."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch.nn import functional as F

from loka_toolkit.analysis import analyze
from loka_toolkit.artifacts.dispatch_table import DispatchTable, Objective
from loka_toolkit.artifacts.safety_map import SafetyMap, Verdict
from loka_toolkit.datasets.click_log import ClickLog
from loka_toolkit.dispatch import build_table, install
from loka_toolkit.environment import CPU_CHIP
from loka_toolkit.errors import ArtifactExistsError
from loka_toolkit.harness import replay
from loka_toolkit.recording import Schedule, record
from loka_toolkit.reporting import write_report
from loka_toolkit.workflows.summaries import summarize_map
from loka_toolkit.workflows.two_tower import TensorBatch, TwoTower

Progress = Callable[[str, int, int], None]

RECIPES = (
    "e4m3/tensorwise/fp32",
    "e4m3/rowwise/fp32",
    "e4m3/static/fp32",
    "e5m2-e4m3/tensorwise/fp32",
)
"""Recipes considered: on a CPU, scaled_mm accumulates in float32."""

CANDIDATES = ("torch.matmul/fp32", *(f"torch.scaled_mm/{recipe}" for recipe in RECIPES))

_EVALUATION_SEED = 10**9


@dataclasses.dataclass(frozen=True)
class DemoSize:
    """How much the demo does.

    Attributes:
        recorded_steps: Training steps under the recorder.
        further_steps: Training steps with and without the table, in every pair.
        pairs: Pairs of continuations, each on rows of its own.
        batch: Rows per step.
        evaluation_rows: Fresh rows on which the two arms of a pair are compared.
        learning_rate: Of Adam.
    """

    recorded_steps: int = 120
    further_steps: int = 40
    pairs: int = 6
    batch: int = 512
    evaluation_rows: int = 16_384
    learning_rate: float = 2e-3


class PairedDifference(msgspec.Struct, frozen=True):
    """Log loss after training on with and without the table, over pairs of continuations.

    The arms of a pair start from the same weights and see the same rows. Pairs see different rows,
    so the spread of their differences holds what matters: which rows are evaluated, and how any
    small change at the start grows into another trajectory.

    Attributes:
        pairs: Number of pairs.
        log_loss_default: Mean log loss of the arms in their original precision.
        log_loss_table: Mean log loss of the arms with the table installed.
        relative_difference: Mean over pairs of (table - default) / default.
        standard_error: Of the relative difference, over pairs.
        resolved: Whether the difference is at least 2 standard errors.
    """

    pairs: int
    log_loss_default: float
    log_loss_table: float
    relative_difference: float
    standard_error: float
    resolved: bool


class DemoRun(msgspec.Struct, frozen=True):
    """Where everything lies and how long it took: what may differ between two runs.

    Attributes:
        paths: Artifact name to path.
        seconds: Stage to seconds.
    """

    paths: dict[str, str]
    seconds: dict[str, float]


class DemoSummary(msgspec.Struct, frozen=True):
    """What the demo found.

    Attributes:
        seed: Seed of data and model.
        chip: Chip it ran on.
        objective: What the table was built for.
        site_verdicts: Sites per verdict.
        cell_verdicts: Cells (site x recipe) per verdict.
        unsafe_sites: Sites unsafe under every recipe considered, with the reason.
        fp8_sites: Sites per role that ran in FP8 in the last stage.
        misses: Sites that did not, by reason.
        run_time_misses: Products that fell back while training, by reason.
        sampler_healthy: Whether the fit passed its gates.
        difference: Log loss with the table against without it.
        run: Paths and times.
    """

    seed: int
    chip: str
    objective: str
    site_verdicts: dict[str, int]
    cell_verdicts: dict[str, int]
    unsafe_sites: dict[str, str]
    fp8_sites: dict[str, int]
    misses: dict[str, int]
    run_time_misses: dict[str, int]
    sampler_healthy: bool
    difference: PairedDifference
    run: DemoRun


def run_demo(
    out: Path,
    *,
    seed: int = 0,
    force: bool = False,
    size: DemoSize | None = None,
    progress: Progress | None = None,
) -> DemoSummary:
    """Walk the whole road and write every artifact below ``out``.

    Args:
        out: Directory for the trace, the map, the results, the table and the report.
        seed: Seed of the data, the model and the analysis.
        force: Overwrite what is in ``out``.
        size: How much to do.
        progress: Called with stage, done and total.

    Raises:
        ArtifactExistsError: If ``out`` is a file, or holds something and ``force`` is false.
    """
    if out.exists() and not out.is_dir():
        raise ArtifactExistsError(f"{out} is a file; the demo needs a directory of its own")
    if out.exists() and any(out.iterdir()) and not force:
        raise ArtifactExistsError(f"{out} is not empty; use --force to overwrite it")
    with single_thread():
        return _walk(out, seed, force, size or DemoSize(), progress)


@contextmanager
def single_thread() -> Iterator[None]:
    """Compute on one thread: products this small lose more to waiting threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _walk(
    out: Path, seed: int, force: bool, size: DemoSize, progress: Progress | None
) -> DemoSummary:
    tell = progress or (lambda stage, done, total: None)
    paths = {
        "trace": out / "trace",
        "safety": out / "safety.parquet",
        "replay": out / "replay.parquet",
        "table": out / "table.json",
        "report": out / "report.html",
    }
    clock = StageClock()
    log = ClickLog(seed=seed)
    torch.manual_seed(seed)
    model = TwoTower(log.spec)
    optimizer = torch.optim.Adam(model.parameters(), lr=size.learning_rate)

    with clock.stage("train and record"):
        schedule = Schedule(warm_steps=size.recorded_steps // 3, warm_every=3, every=6)
        with record(
            model, paths["trace"], schedule=schedule, recipes=RECIPES, seed=seed, force=force
        ) as recorder:
            for step in range(size.recorded_steps):
                batch = TensorBatch.of(log.batch(size.batch, step))
                loss = train_step(model, optimizer, batch)
                recorder.step(loss=loss, examples=size.batch, reduction="mean")
                tell("train and record", step + 1, size.recorded_steps)
    with clock.stage("analyze"):
        safety = analyze(paths["trace"], seed=seed, progress=tell)
        safety.save(paths["safety"], force=force)
    with clock.stage("replay"):
        results = replay(
            paths["trace"],
            paths["replay"],
            candidates=CANDIDATES,
            device="cpu",
            draws=1,
            seed=seed,
            force=force,
            progress=tell,
        )
    with clock.stage("build table"):
        table = build_table(safety, results, chip=CPU_CHIP, objective=Objective.COVERAGE)
        table.save(paths["table"], force=force)
    with clock.stage("train on, both arms"):
        outcome = train_both_arms(model, optimizer, log, table, size, tell)
    with clock.stage("report"):
        write_report(
            paths["report"],
            safety,
            trace=paths["trace"],
            replay=results,
            table=table,
            force=force,
        )
    run = DemoRun({name: str(path) for name, path in paths.items()}, clock.seconds)
    return _summary(seed, safety, table, outcome, run)


def train_step(
    model: TwoTower, optimizer: torch.optim.Optimizer, batch: TensorBatch
) -> torch.Tensor:
    """Take one optimizer step on the mean log loss and return the loss, detached."""
    optimizer.zero_grad(set_to_none=True)
    loss = F.binary_cross_entropy_with_logits(model(batch), batch.clicks)
    torch.autograd.backward(loss)
    optimizer.step()
    return loss.detach()


def paired_difference(default: Sequence[float], table: Sequence[float]) -> PairedDifference:
    """Compare the mean log losses of the arms of some pairs; at least two pairs.

    Args:
        default: Mean log loss per pair without the table.
        table: The same with it.
    """
    before, after = np.asarray(default), np.asarray(table)
    relative = (after - before) / before
    error = float(relative.std(ddof=1)) / math.sqrt(len(relative))
    difference = float(relative.mean())
    return PairedDifference(
        pairs=len(relative),
        log_loss_default=float(before.mean()),
        log_loss_table=float(after.mean()),
        relative_difference=difference,
        standard_error=error,
        resolved=difference != 0.0 and abs(difference) >= 2.0 * error,
    )


class StageClock:
    """Seconds per stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        begin = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - begin, 2)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the last stage of the road brought.

    Attributes:
        difference: Log loss with the table against without it.
        fp8_sites: Sites per role that ran in FP8.
        misses: Sites that did not, by reason.
        run_time_misses: Products that fell back while training, by reason.
    """

    difference: PairedDifference
    fp8_sites: dict[str, int]
    misses: dict[str, int]
    run_time_misses: dict[str, int]


def train_both_arms(
    model: TwoTower,
    optimizer: torch.optim.Optimizer,
    log: ClickLog,
    table: DispatchTable,
    size: DemoSize,
    tell: Progress,
) -> Outcome:
    """Train pairs of copies on, one of each pair with the table; the model is left as it is."""
    losses: dict[bool, list[float]] = {False: [], True: []}
    sites: set[tuple[str, str]] = set()
    fallbacks: Counter[str] = Counter()
    misses: Counter[str] = Counter()
    for pair in range(size.pairs):
        for with_table in (False, True):
            arm = copy.deepcopy(model)
            arm_optimizer = torch.optim.Adam(arm.parameters(), lr=size.learning_rate)
            # load_state_dict keeps the tensors it is given; without a copy arms would share them.
            arm_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            installation = install(arm, table) if with_table else None
            for index in range(size.further_steps):
                step = size.recorded_steps + pair * size.further_steps + index
                train_step(arm, arm_optimizer, TensorBatch.of(log.batch(size.batch, step)))
            rows = TensorBatch.of(log.batch(size.evaluation_rows, _EVALUATION_SEED + pair))
            losses[with_table].append(_mean_log_loss(arm, rows, size.batch))
            if installation is not None:
                for row in installation.counts_by_site():
                    sites |= {(row.role, row.fqn)} if row.hits else set()
                    fallbacks.update(row.misses)
                misses = Counter(s.reason.value for s in installation.sites() if s.reason)
        tell("train on, both arms", pair + 1, size.pairs)
    return Outcome(
        difference=paired_difference(losses[False], losses[True]),
        fp8_sites=dict(sorted(Counter(role for role, _ in sites).items())),
        misses=dict(sorted(misses.items())),
        run_time_misses=dict(sorted(fallbacks.items())),
    )


def _summary(
    seed: int,
    safety: SafetyMap,
    table: DispatchTable,
    outcome: Outcome,
    run: DemoRun,
) -> DemoSummary:
    found = summarize_map(safety)
    unsafe = {
        verdict.site: verdict.reason
        for verdict in safety.site_verdicts()
        if verdict.verdict is Verdict.UNSAFE
    }
    return DemoSummary(
        seed=seed,
        chip=table.chip,
        objective=table.objective.value,
        site_verdicts=found.sites,
        cell_verdicts=found.cells,
        unsafe_sites=unsafe,
        fp8_sites=outcome.fp8_sites,
        misses=outcome.misses,
        run_time_misses=outcome.run_time_misses,
        sampler_healthy=found.healthy,
        difference=outcome.difference,
        run=run,
    )


@torch.no_grad()
def _mean_log_loss(model: TwoTower, rows: TensorBatch, batch: int) -> float:
    total = 0.0
    for begin in range(0, len(rows.clicks), batch):
        part = TensorBatch(
            **{
                field.name: getattr(rows, field.name)[begin : begin + batch]
                for field in dataclasses.fields(TensorBatch)
            }
        )
        losses = F.binary_cross_entropy_with_logits(model(part), part.clicks, reduction="none")
        total += float(losses.double().sum())
    return total / len(rows.clicks)
