"""The bench: trace, candidates and draws of one process, and the rows measured there."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Sequence

import torch

from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.environment import chip_of
from loka_toolkit.errors import ConfigurationError
from loka_toolkit.harness.inputs import InputDrawer
from loka_toolkit.harness.moments import MomentsOfTrace
from loka_toolkit.harness.outcome import Outcome, outcome_of
from loka_toolkit.harness.timing import TimingPolicy
from loka_toolkit.harness.trial import Trial
from loka_toolkit.harness.workloads import Workload, workloads_of
from loka_toolkit.kernels.contract import Candidate, Chip

DEFAULT_CATALOG = "loka_toolkit.kernels.catalog:catalog"
"""Where candidates come from unless told otherwise."""


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """What a bench needs to know; the same settings give the same numbers in any process.

    Attributes:
        trace: Directory of the trace.
        catalog: ``module:function`` that returns the candidates.
        device: For example ``cpu`` or ``cuda:0``.
        policy: How rows are timed.
        draws: Input draws per workload.
        seed: Seed of the draws.
        shapes_per_site: Token counts replayed per site.
        threads: CPU threads per operator, as in the process that asks.
    """

    trace: str
    catalog: str
    device: str
    policy: TimingPolicy
    draws: int
    seed: int
    shapes_per_site: int
    threads: int


@dataclasses.dataclass(frozen=True)
class Measured:
    """A row's outcome and where its inputs came from.

    Attributes:
        outcome: The outcome.
        inputs: ``moments``, the reason for anything else, or ``not drawn``.
        unusable: Why this process can measure nothing more, or None.
    """

    outcome: Outcome
    inputs: str
    unusable: str | None = None


NOT_DRAWN = "not drawn"
"""What ``inputs`` of a row says if the candidate was never run."""


class Bench:
    """Measures workloads under candidates, one at a time, and keeps the draws of the last one.

    Args:
        settings: What to measure and how.

    Raises:
        LokaError: If the trace or the catalog cannot be used.
    """

    def __init__(self, settings: BenchSettings) -> None:
        trace = Trace.open(settings.trace)
        self.settings = settings
        self.device = torch.device(settings.device)
        self.plan = workloads_of(trace, shapes_per_site=settings.shapes_per_site)
        self.candidates = load_catalog(settings.catalog)
        self.chip = chip_at(self.device)
        self._drawer = InputDrawer(MomentsOfTrace(trace), self.device, settings.seed)
        self._drawn: tuple[Workload, list[Trial], str] | None = None

    def measure(
        self,
        workload: Workload,
        candidate: Candidate,
        started: Callable[[str, str], None] = lambda phase, inputs: None,
    ) -> Measured:
        """Return the outcome of one workload under one candidate; failures are outcomes.

        Args:
            workload: One of the plan's workloads.
            candidate: One of the candidates.
            started: Told of each phase and of where the inputs came from.
        """
        inputs = NOT_DRAWN

        def trials() -> Sequence[Trial]:
            nonlocal inputs
            drawn, inputs = self._trials(workload)
            return drawn

        with self._on_device():
            outcome = outcome_of(
                workload,
                candidate,
                trials,
                self.chip,
                self.settings.policy,
                self.device,
                lambda phase: started(phase, inputs),
            )
        return Measured(outcome, inputs, self._unusable())

    def _trials(self, workload: Workload) -> tuple[list[Trial], str]:
        if self._drawn is None or self._drawn[0] != workload:
            self._drawn = None  # frees the last workload's memory before the next is drawn
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            draws = [self._drawer.draw(workload, index) for index in range(self.settings.draws)]
            self._drawn = (
                workload,
                [
                    Trial(
                        d.a,
                        d.b,
                        workload.problem.dtype,
                        (d.amax_a, d.amax_b),
                        parameter=workload.problem.multiplies_parameter,
                    )
                    for d in draws
                ],
                draws[0].inputs,
            )
        return self._drawn[1], self._drawn[2]

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        """Make the device current: streams, graphs and libraries take the current one."""
        if self.device.type == "cuda":
            return torch.cuda.device(self.device)
        return contextlib.nullcontext()

    def _unusable(self) -> str | None:
        """An illegal access poisons a CUDA context for good: every later call fails too."""
        if self.device.type != "cuda":
            return None
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return None


def load_catalog(reference: str) -> tuple[Candidate, ...]:
    """Return the candidates that ``module:function`` lists.

    Raises:
        ConfigurationError: If the reference cannot be resolved or two candidates share a name.
    """
    module_name, _, function_name = reference.partition(":")
    try:
        found = tuple(getattr(importlib.import_module(module_name), function_name)())
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"no candidates at {reference!r} ({error}); give MODULE:FUNCTION of a function that "
            f"returns candidates, as {DEFAULT_CATALOG} does"
        ) from error
    names = [candidate.name for candidate in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(
            f"candidates of {reference!r} share the name {twice[0]!r}; give each its own"
        )
    return found


def chip_at(device: torch.device) -> Chip:
    """Return the chip behind a device."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return Chip(name=chip_of(device), capability=capability)
