"""The recorder: a context manager around a training loop, told of every optimizer step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from loka_toolkit.artifacts.trace import ERRORS, OPERANDS, SITES, STEPS, RunStatus
from loka_toolkit.errors import ConfigurationError
from loka_toolkit.numerics.recipes import DEFAULT_RECIPE_NAMES
from loka_toolkit.numerics.scaling import STATIC_HEADROOM
from loka_toolkit.recording import rows
from loka_toolkit.recording.caveats import step_caveats
from loka_toolkit.recording.claim import claim, release
from loka_toolkit.recording.eager import EagerStance
from loka_toolkit.recording.events import EventLog
from loka_toolkit.recording.interception import Interception
from loka_toolkit.recording.layers import StepRecord
from loka_toolkit.recording.loss import BackwardWatch
from loka_toolkit.recording.memory import RunMemory
from loka_toolkit.recording.modules import ModelNames
from loka_toolkit.recording.observer import Observer
from loka_toolkit.recording.schedule import Schedule
from loka_toolkit.recording.settings import RecorderSettings
from loka_toolkit.recording.switchboard import MODE_STAYS
from loka_toolkit.recording.units import LossUnits, StepFacts, resolve_units, understand_step
from loka_toolkit.recording.verification import ImpactCheck, LossClosure, verify_impact
from loka_toolkit.recording.writer import TraceWriter


class Recorder:
    """Records a training run; made by :func:`record`.

    Use it as a context manager and call :meth:`step` once after each optimizer step. Once it is
    open it raises nothing: what goes wrong inside is counted as an event of the trace and shown
    once as a UserWarning.

    Args:
        model: The model; wrappers of DDP, FSDP and torch.compile are looked through.
        settings: Validated settings.

    Raises:
        ConfigurationError: If the model has no parameters.
        NoMatchError: If a glob matches no module.
    """

    def __init__(self, model: nn.Module, settings: RecorderSettings) -> None:
        self._names = ModelNames.of(model)
        settings.check_patterns(sorted(set(self._names.types)))
        self._model = model
        self._settings = settings
        self._writer = TraceWriter(settings)
        self._events = EventLog()
        self._memory = RunMemory()
        self._observer = Observer(settings, self._memory.static, self._names.types)
        self._known_sites: set[tuple[Any, ...]] = set()
        self._step = 0
        self._recorded = 0
        self._is_open = False
        self._is_disabled = False
        self._interception: Interception | None = None
        self._watch: BackwardWatch | None = None
        self._stance = EagerStance()
        self._record: StepRecord | None = None
        self._last_said = StepFacts()
        self._left_standing: list[Interception] = []

    @property
    def path(self) -> Path:
        """Directory of the trace."""
        return self._settings.path

    @property
    def steps_seen(self) -> int:
        """Calls of :meth:`step` so far."""
        return self._step

    @property
    def steps_recorded(self) -> int:
        """Steps that left rows so far."""
        return self._recorded

    def __enter__(self) -> Self:
        """Claim the directory and begin.

        Raises:
            ArtifactExistsError: If the directory is not empty and ``force`` is false.
            ConfigurationError: If it cannot be written, if this recorder was opened before, or
                while another one of the same model or directory is open.
        """
        if self._is_open or self._step:
            raise ConfigurationError("a recorder is opened once; call record() again")
        claim(self, self.path, self._model)
        try:
            self._writer.open(self._settings.as_config())
            self._is_open = True
            for kind, message in self._names.caveats():
                self._events.add(kind, message)
            self._safely(self._begin_step)
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Write what is left; an exception of the training script passes through untouched."""
        try:
            self._safely(self._stop_watching)
            self._safely(self._close)
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Leave nothing in PyTorch and hold no claim, whatever was raised before."""
        self._is_open = False
        try:
            self._safely(self._stop_watching)
        finally:
            release(self)

    def step(
        self,
        *,
        loss: float | torch.Tensor | None = None,
        examples: int | torch.Tensor | None = None,
        loss_scale: float | None = None,
        reduction: str | None = None,
    ) -> None:
        """Tell that an optimizer step is done.

        Every argument is optional: what is not given is read off the autograd graph where the loss
        is of a known kind. With several micro-batches per step, only the first is recorded, and
        the arguments speak of that one.

        Args:
            loss: The loss, in the units of the training script.
            examples: Number of examples, whose rows come in equal consecutive blocks; or an integer
                tensor with the example of every row, counted from 0.
            loss_scale: Factor by which the loss was multiplied before backward.
            reduction: ``"mean"`` or ``"sum"`` over examples.
        """
        if not self._is_open:
            self._events.add("step-outside", "step() was called outside of the context", warn=True)
            return
        said = StepFacts()
        record = self._record
        try:
            if record is not None:
                said = understand_step(
                    loss,
                    examples,
                    loss_scale,
                    reduction,
                    lambda message: self._events.add(
                        "bad-argument", message, self._step, warn=True
                    ),
                )
            self._stop_watching()
            if record is not None:
                start = time.perf_counter()
                with _disable_current_modes():  # another recorder's may stand
                    self._end_step(record, said, start)
        except Exception as failure:
            self._fail(failure)
        self._step += 1
        self._safely(self._begin_step)

    def restart_step(self) -> None:
        """Forget what was seen since the last step: its gradients will not be used."""
        if self._is_open:
            self._safely(self._stop_watching)
            self._safely(self._begin_step)

    @property
    def knows_loss_scale(self) -> bool:
        """Whether the graph told the factor of the loss, or nobody will ask for it."""
        loss = self._record.loss if self._record is not None else None
        return self._record is None or (loss is not None and loss.loss_scale is not None)

    def verify(
        self, loss_closure: LossClosure, inputs: Sequence[torch.Tensor], **options: Any
    ) -> list[ImpactCheck]:
        """Check impact against float64 differences, between two steps; see :func:`verify_impact`.

        A disagreement is an event of the trace.

        Raises:
            ConfigurationError: As :func:`verify_impact`.
        """
        self._safely(self._stop_watching)
        try:
            checks = verify_impact(self._model, loss_closure, inputs, **options)
        finally:
            if self._is_open:
                self._safely(self._begin_step)
        for check in checks:
            if not check.agrees:
                self._events.add("impact-not-verified", str(check), self._step, warn=True)
        return checks

    # One step

    def _begin_step(self) -> None:
        if self._is_disabled or not self._settings.schedule.is_active(self._step):
            return
        record = StepRecord(step=self._step)
        interception = Interception(
            self._model,
            self._names,
            self._observer,
            record,
            said_examples=self._last_said.example_count,
            said_loss_scale=self._last_said.loss_scale,
            report=self._fail,
        )
        watch = BackwardWatch(interception.on_loss, self._fail, self._model)
        self._record, self._watch, self._interception = record, watch, interception
        self._stance.install()
        watch.install()
        interception.install()

    def _stop_watching(self) -> None:
        watch, interception = self._watch, self._interception
        self._watch = self._interception = self._record = None
        self._stance.remove()
        if watch is not None:
            watch.remove()
        while self._left_standing and self._left_standing[-1].remove():
            self._left_standing.pop()
        if interception is not None and not interception.remove():
            self._left_standing.append(interception)
            self._events.add("mode-not-removed", MODE_STAYS, self._step, warn=True)

    def _end_step(self, record: StepRecord, said: StepFacts, start: float) -> None:
        units = resolve_units(
            said,
            record.loss,
            lambda message: self._events.add("contradiction", message, record.step, warn=True),
        )
        self._last_said = said.as_understood(units.examples)
        if units.saturated_count:
            self._events.add("saturated-examples", record.saturation_note, record.step)
        status, reason = self._judge(record, units)
        rank = self._settings.rank
        if status == "recorded":
            try:
                errors = rows.error_rows(record, rank, units)
                operands = rows.operand_rows(record, rank)
                self._memory.add(record, units, self._events)
            except Exception as failure:
                self._fail(failure)
                status, reason = "failed", str(failure)
            else:
                self._writer.add(ERRORS, errors)
                self._writer.add(OPERANDS, operands)
                self._add_sites(record)
                self._recorded += 1
        record.seconds += time.perf_counter() - start
        self._writer.add(STEPS, [rows.step_row(record, rank, status, reason, units)])
        if self._writer.end_step():
            self._flush(closed=False)

    def _judge(self, record: StepRecord, units: LossUnits) -> tuple[str, str | None]:
        if record.failures:
            return "failed", record.failures[0]
        reason = record.nonfinite
        if units.loss is not None and not math.isfinite(units.loss):
            reason = f"the loss is {units.loss}"
        if reason is not None:
            self._events.add(
                "nonfinite-step", "steps with Inf or NaN were left out", record.step, warn=True
            )
            return "nonfinite", reason
        for kind, message, warn in step_caveats(record, self._names.compiled):
            self._events.add(kind, message, record.step, warn=warn)
        return "recorded", None

    def _add_sites(self, record: StepRecord) -> None:
        fresh = []
        for identity, row in zip(record.site_rows, rows.site_rows(record), strict=True):
            if identity not in self._known_sites:
                self._known_sites.add(identity)
                fresh.append(row)
        self._writer.add(SITES, fresh)

    # Edges

    def _flush(self, *, closed: bool) -> None:
        status = RunStatus(closed=closed, steps_seen=self._step, steps_recorded=self._recorded)
        if not closed:
            # The step under way counts: its rows are in this flush.
            status = RunStatus(False, self._step + 1, self._recorded)
        try:
            self._writer.flush(status, self._events.snapshot(), self._memory)
        except OSError as error:
            self._is_disabled = True
            self._events.add(
                "write-failed",
                f"recording stopped: cannot write to {self._settings.path}: "
                f"{error.strerror or error}",
                self._step,
                warn=True,
            )

    def _close(self) -> None:
        schedule, seen = self._settings.schedule, range(self._step)
        if self._step == 0:
            self._events.add(
                "no-step", "step() was never called, so nothing was recorded", warn=True
            )
        elif not (self._recorded or self._is_disabled or any(map(schedule.is_active, seen))):
            self._events.add(
                "schedule-never-active",
                f"the schedule was never active in {self._step} steps ({schedule}), so nothing was "
                "recorded",
                warn=True,
            )
        if self._is_disabled:
            self._last_words()
            return
        self._flush(closed=True)
        if not self._is_disabled:
            self._writer.compact()

    def _last_words(self) -> None:
        """After a failed write, try to leave a manifest that says so."""
        status = RunStatus(closed=True, steps_seen=self._step, steps_recorded=self._recorded)
        try:
            self._writer.write_manifest(status, self._events.snapshot())
        except OSError:
            return  # the warning given when writing failed is all that can be said

    def _safely(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as failure:
            self._fail(failure)

    def _fail(self, failure: Exception) -> None:
        message = f"{type(failure).__name__}: {failure}".splitlines()[0]
        self._events.add("internal-failure", message, self._step, warn=True)
        if self._record is not None:
            self._record.failures.append(message)


def record(
    model: nn.Module,
    path: str | Path,
    *,
    schedule: Schedule | None = None,
    recipes: Sequence[str] = DEFAULT_RECIPE_NAMES,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rank: int | None = None,
    world_size: int | None = None,
    max_rows: int = 256,
    max_columns: int = 256,
    headroom: float = STATIC_HEADROOM,
    moments_width: int = 1024,
    seed: int = 0,
    force: bool = False,
    upstream_cells: int = 12,
) -> Recorder:
    """Return a recorder for a training run.

        with record(model, "run") as recorder:
            for batch in loader:
                ...
                optimizer.step()
                recorder.step()

    Args:
        model: The model that is trained.
        path: Directory of the trace.
        schedule: When to record; by default the first 20 steps, then every 1000th.
        recipes: Names of the recipes to answer for.
        include: Globs of module paths to record; empty for all of them.
        exclude: Globs of module paths to leave out.
        rank: Rank of this process; by default that of torch.distributed, or 0.
        world_size: Number of ranks, likewise.
        max_rows: Output rows on which errors are computed; of forward sites whole examples, at
            least 8 of them.
        max_columns: Output columns of gradient sites on which errors are computed.
        headroom: Factor of a static scale above the largest amax of earlier sampled steps.
        moments_width: Widest operand of which the full covariance is kept.
        seed: Seed of the sampling.
        force: Overwrite a trace that is at ``path`` already.
        upstream_cells: Gradient sites x recipes whose error is followed to the parameters upstream
            at each recorded step, in turn; each costs about one more backward pass. 0 for none.

    Raises:
        UnknownNameError: If a recipe does not exist; near misses are listed.
        NoMatchError: If a glob matches no module; near misses are listed.
        ConfigurationError: If another argument is wrong or the model has no parameters.
    """
    settings = RecorderSettings.validated(
        path,
        schedule=schedule,
        recipes=recipes,
        include=include,
        exclude=exclude,
        rank=rank,
        world_size=world_size,
        max_rows=max_rows,
        max_columns=max_columns,
        headroom=headroom,
        moments_width=moments_width,
        seed=seed,
        force=force,
        upstream_cells=upstream_cells,
    )
    return Recorder(model, settings)
