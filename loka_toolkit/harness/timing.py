"""Measurement policies: how a time is taken, as data, and the three clocks behind them."""

from __future__ import annotations

import dataclasses
import enum
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from loka_toolkit.errors import ConfigurationError, UnknownNameError


class Method(enum.StrEnum):
    """Which clock is read.

    ``host-clock``: the CPU's monotonic clock around each call. ``cuda-events``: GPU events around
    each call, the L2 cache flushed before it; includes launch gaps. ``cuda-graph``: many calls on
    rotating copies of the operands captured in one graph, events around its replay; what a
    training step captured or compiled would see.
    """

    HOST_CLOCK = "host-clock"
    CUDA_EVENTS = "cuda-events"
    CUDA_GRAPH = "cuda-graph"


@dataclasses.dataclass(frozen=True)
class TimingPolicy:
    """How one workload and candidate is timed.

    Attributes:
        name: Name in results and on the command line.
        description: One sentence for readers of the results.
        method: Which clock.
        warmups: Untimed calls before.
        repetitions: Timed repetitions at most.
        seconds: Time after which no further repetition begins, per quantity measured.
        row_seconds: Time after which the whole row, judging included, is given up as timed out.
    """

    name: str
    description: str
    method: Method
    warmups: int
    repetitions: int
    seconds: float
    row_seconds: float

    def validated(self) -> TimingPolicy:
        """Return self if every number makes sense.

        Raises:
            ConfigurationError: Naming the field, its value and its limits.
        """
        for field, least in (
            ("warmups", 0),
            ("repetitions", 1),
            ("seconds", 0.0),
            ("row_seconds", 0.0),
        ):
            value = getattr(self, field)
            if not least <= value < float("inf"):
                raise ConfigurationError(
                    f"policy {self.name!r}: {field} = {value!r} must be at least {least}; "
                    f"start from one of {', '.join(POLICIES)}"
                )
        return self


POLICIES: dict[str, TimingPolicy] = {
    policy.name: policy
    for policy in (
        TimingPolicy(
            name="cpu-median",
            description=(
                "host clock around each call, median of at most 15 repetitions after 1 warm-up, "
                "caches warm"
            ),
            method=Method.HOST_CLOCK,
            warmups=1,
            repetitions=15,
            seconds=0.05,
            row_seconds=60.0,
        ),
        TimingPolicy(
            name="cuda-graph",
            description=(
                "one CUDA graph of at least 10 calls on rotating copies of the operands that "
                "together exceed twice the L2 cache, events around its replay, median of 30 replays"
            ),
            method=Method.CUDA_GRAPH,
            warmups=3,
            repetitions=30,
            seconds=2.0,
            row_seconds=300.0,
        ),
        TimingPolicy(
            name="cuda-events",
            description=(
                "CUDA events around each call, L2 cache flushed before it, median of 30 calls; "
                "includes launch gaps"
            ),
            method=Method.CUDA_EVENTS,
            warmups=3,
            repetitions=30,
            seconds=2.0,
            row_seconds=300.0,
        ),
    )
}
"""The policies by name."""


def policy_for(policy: TimingPolicy | str | None, device: torch.device) -> TimingPolicy:
    """Return a policy by name, or the default of the device.

    Raises:
        UnknownNameError: If no policy has that name.
        ConfigurationError: If its clock does not exist on the device, or a number makes no sense.
    """
    if policy is None:
        policy = "cuda-graph" if device.type == "cuda" else "cpu-median"
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise UnknownNameError("timing policy", policy, POLICIES)
        policy = POLICIES[policy]
    if (policy.method is Method.HOST_CLOCK) == (device.type == "cuda"):
        raise ConfigurationError(
            f"timing policy {policy.name!r} reads the {policy.method} clock, which says nothing on "
            f"{device.type}; choose {'cuda-graph' if device.type == 'cuda' else 'cpu-median'}"
        )
    return policy.validated()


@dataclasses.dataclass(frozen=True)
class Times:
    """Times of one quantity.

    Attributes:
        median_us: Median per call.
        p10_us: 10 % quantile.
        p90_us: 90 % quantile.
        repetitions: Repetitions behind them.
        note: What differed from the policy, or None.
    """

    median_us: float
    p10_us: float
    p90_us: float
    repetitions: int
    note: str | None = None


Call = Callable[[], object]


def measure(calls: Sequence[Call], policy: TimingPolicy, device: torch.device) -> Times:
    """Time equivalent calls under a policy.

    Args:
        calls: The same work on different copies of its operands; they are called in rotation.
        policy: The policy.
        device: Where the work runs.
    """
    for index in range(policy.warmups):
        calls[index % len(calls)]()
    if policy.method is Method.HOST_CLOCK:
        return _summary(_host_clock(calls, policy))
    torch.cuda.synchronize(device)
    if policy.method is Method.CUDA_EVENTS:
        return _summary(_cuda_events(calls, policy, device))
    try:
        return _summary(_cuda_graph(calls, policy, device))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        torch.cuda.synchronize(device)
        _end_failed_capture(device)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        note = f"no CUDA graph could be captured ({reason}): timed with CUDA events"
        return _summary(_cuda_events(calls, policy, device), note)


def copies_needed(footprint_bytes: int, policy: TimingPolicy, device: torch.device) -> int:
    """Return how many copies of the operands rotate, so that none is found in the L2 cache."""
    if policy.method is not Method.CUDA_GRAPH:
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(_MOST_COPIES, -(-2 * cache // max(footprint_bytes, 1)) + 1))


_MOST_COPIES = 32
_LEAST_CALLS_PER_GRAPH = 10


def _host_clock(calls: Sequence[Call], policy: TimingPolicy) -> list[float]:
    times: list[float] = []
    deadline = time.perf_counter() + policy.seconds
    while len(times) < policy.repetitions:
        call = calls[len(times) % len(calls)]
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
        if time.perf_counter() > deadline:
            break
    return times


def _cuda_events(calls: Sequence[Call], policy: TimingPolicy, device: torch.device) -> list[float]:
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(max(2 * cache, 1), dtype=torch.int8, device=device)
    times: list[float] = []
    deadline = time.perf_counter() + policy.seconds
    while len(times) < policy.repetitions:
        start, end = _event(), _event()
        flush.zero_()
        start.record()
        calls[len(times) % len(calls)]()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
        if time.perf_counter() > deadline:
            break
    return times


def _cuda_graph(calls: Sequence[Call], policy: TimingPolicy, device: torch.device) -> list[float]:
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    rounds = -(-_LEAST_CALLS_PER_GRAPH // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize(device)
    count = rounds * len(calls)
    times: list[float] = []
    deadline = time.perf_counter() + policy.seconds
    while len(times) < policy.repetitions:
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
        if time.perf_counter() > deadline:
            break
    return times


def _end_failed_capture(device: torch.device) -> None:
    """Capture something that works: a failed capture leaves the random generators capturing."""
    value = torch.zeros(1, device=device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        value += 1
    torch.cuda.synchronize(device)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _summary(times: list[float], note: str | None = None) -> Times:
    ordered = sorted(times)

    def quantile(probability: float) -> float:
        return ordered[min(len(ordered) - 1, round(probability * (len(ordered) - 1)))]

    return Times(
        median_us=statistics.median(ordered),
        p10_us=quantile(0.1),
        p90_us=quantile(0.9),
        repetitions=len(ordered),
        note=note,
    )
