"""One workload under one candidate, in this process: every failure becomes a status."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from loka_toolkit.artifacts.replay_results import Status
from loka_toolkit.harness.judge import REPEATS, Judgement, judge
from loka_toolkit.harness.kernel_names import kernels_run
from loka_toolkit.harness.timing import Times, TimingPolicy, copies_needed, measure
from loka_toolkit.harness.trial import Trial, prepare, recipe_of
from loka_toolkit.harness.workloads import Workload
from loka_toolkit.kernels.contract import Candidate, Chip, Side
from loka_toolkit.numerics.metrics import SQNR_CEILING_DB, SQNR_FLOOR_DB

_COMPILERS = ("triton", "torch._inductor", "torch._dynamo", "torch.utils.cpp_extension")
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a candidate did on a workload; see the columns of the replay results for units."""

    status: Status
    detail: str | None = None
    kernel_sqnr_db: float | None = None
    total_sqnr_db: float | None = None
    emulation_sqnr_db: float | None = None
    excess_error: float | None = None
    draws: int = 0
    latency_us: float | None = None
    latency_us_p10: float | None = None
    latency_us_p90: float | None = None
    cast_a_us: float | None = None
    cast_b_us: float | None = None
    gemm_us: float | None = None
    repetitions: int = 0
    kernel_ran: str | None = None


def outcome_of(
    workload: Workload,
    candidate: Candidate,
    trials: Callable[[], Sequence[Trial]],
    chip: Chip,
    policy: TimingPolicy,
    device: torch.device,
    started: Callable[[str], None] = lambda phase: None,
) -> Outcome:
    """Judge and time a candidate on a workload; nothing that it raises passes through.

    Args:
        workload: The workload.
        candidate: The candidate.
        trials: Makes the draws; called only if the candidate can run at all.
        chip: Where it runs, for the candidate's constraints.
        policy: How it is timed.
        device: Where it runs.
        started: Told of each phase: ``asking``, ``drawing``, ``judging`` and ``timing``.

    Raises:
        KeyboardInterrupt: If the user interrupts.
    """
    started("asking")
    try:
        refused = _refusal(workload, candidate, chip)
        if refused is not None:
            return refused
    except Exception as error:
        return failure(error, "asking what it supports")
    phase = "drawing"
    started(phase)
    try:
        drawn = trials()
        phase = "judging"
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            started(phase)
            outcome = _judged(candidate, drawn, device)
            if outcome.status is not Status.OK or candidate.emulated:
                return outcome
            phase = "timing"
            started(phase)
            return _timed(outcome, candidate, drawn[0], policy, device)
    except (Exception, SystemExit) as error:
        return failure(error, phase)


def failure(error: BaseException, phase: str) -> Outcome:
    """Return the outcome that an exception stands for."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = f"{type(error).__name__} while {phase}" + (f": {lines[0]}" if lines else "")
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    if any(_is_out_of_memory(link) for link in chain):
        return Outcome(Status.OUT_OF_MEMORY, message)
    if any(_is_from_compiler(link) for link in chain):
        return Outcome(Status.FAILED_TO_COMPILE, message)
    return Outcome(Status.CRASHED, message)


def _refusal(workload: Workload, candidate: Candidate, chip: Chip) -> Outcome | None:
    if candidate.version() is None:
        return Outcome(Status.KERNEL_ABSENT, f"{candidate.library} is not installed")
    if workload.site.role not in candidate.roles:
        return Outcome(Status.UNSUPPORTED, f"does not serve the role {workload.site.role}")
    reason = candidate.supports(workload.problem, chip)
    return None if reason is None else Outcome(Status.UNSUPPORTED, reason)


def _judged(candidate: Candidate, trials: Sequence[Trial], device: torch.device) -> Outcome:
    judgements: list[Judgement] = []
    # Emulations are deterministic by construction and slow: repeating them would prove nothing.
    repeats = 1 if candidate.emulated else REPEATS
    for trial in trials:
        judgements.append(judge(candidate, trial, repeats=repeats))
        if judgements[-1].fault is not None:
            break
    fault = judgements[-1].fault
    if fault is not None and len(trials) > 1:
        fault = f"draw {len(judgements)}: {fault}"
    total = _pooled([j.total for j in judgements])
    emulation = _pooled([j.emulation for j in judgements])
    return Outcome(
        status=Status.OK if fault is None else Status.WRONG_NUMERICS,
        detail=fault,
        kernel_sqnr_db=_sqnr_db(_pooled([j.kernel for j in judgements])),
        total_sqnr_db=_sqnr_db(total),
        emulation_sqnr_db=_sqnr_db(emulation),
        excess_error=total / emulation if total is not None and emulation else None,
        draws=len(judgements),
        kernel_ran=None if candidate.emulated else kernels_run(candidate, trials[0], device),
    )


def _timed(
    outcome: Outcome,
    candidate: Candidate,
    trial: Trial,
    policy: TimingPolicy,
    device: torch.device,
) -> Outcome:
    prepared = prepare(candidate, trial)
    static = trial.static_scales(recipe_of(candidate))
    footprint = sum(x.numel() * x.element_size() for x in (trial.a, trial.b))
    cast_bytes = sum(p.data.numel() * p.data.element_size() for p in prepared)
    originals = [(trial.a, trial.b)]
    for _ in range(copies_needed(min(footprint, cast_bytes), policy, device) - 1):
        originals.append((_copy(trial.a), _copy(trial.b)))
    casts = [
        (candidate.prepare(a, Side.A, static[0]), candidate.prepare(b, Side.B, static[1]))
        for a, b in originals
    ]

    def whole(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        left = candidate.prepare(a, Side.A, static[0])
        right = candidate.prepare(b, Side.B, static[1])
        return candidate.run(left, right, trial.out_dtype)

    latency, cast_a, cast_b, gemm = (
        measure(calls, policy, device)
        for calls in (
            [lambda a=a, b=b: whole(a, b) for a, b in originals],
            [lambda a=a: candidate.prepare(a, Side.A, static[0]) for a, _ in originals],
            [lambda b=b: candidate.prepare(b, Side.B, static[1]) for _, b in originals],
            [lambda a=a, b=b: candidate.run(a, b, trial.out_dtype) for a, b in casts],
        )
    )
    return dataclasses.replace(
        outcome,
        detail=_notes(latency, cast_a, cast_b, gemm),
        latency_us=latency.median_us,
        latency_us_p10=latency.p10_us,
        latency_us_p90=latency.p90_us,
        cast_a_us=cast_a.median_us,
        cast_b_us=cast_b.median_us,
        gemm_us=gemm.median_us,
        repetitions=latency.repetitions,
    )


def _notes(*times: Times) -> str | None:
    notes = dict.fromkeys(t.note for t in times if t.note is not None)
    return "; ".join(notes) or None


def _copy(value: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides."""
    return torch.empty_like(value, memory_format=torch.preserve_format).copy_(value)


def _pooled(relative: Sequence[float | None]) -> float | None:
    """Return the root mean square over the draws in which the error is defined."""
    known = [value for value in relative if value is not None]
    return math.sqrt(sum(value**2 for value in known) / len(known)) if known else None


def _sqnr_db(relative: float | None) -> float | None:
    if relative is None:
        return None
    if relative <= 0:
        return SQNR_CEILING_DB
    return max(SQNR_FLOOR_DB, min(SQNR_CEILING_DB, -20 * math.log10(relative)))


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error).lower() for words in _NO_MEMORY
    )


def _is_from_compiler(error: BaseException) -> bool:
    modules = [kind.__module__ for kind in type(error).__mro__]
    return any(
        module == compiler or module.startswith(compiler + ".")
        for module in modules
        for compiler in _COMPILERS
    )
