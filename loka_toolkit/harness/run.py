"""Replay: the GEMMs of a trace through candidate kernels, resumable, every failure a row."""

from __future__ import annotations

import contextlib
import fnmatch
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from loka_toolkit.artifacts.replay_results import ReplayFacts, ReplayResults, ReplayRow, Status
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.environment import CPU_CHIP, Environment, current_environment, timestamp
from loka_toolkit.errors import (
    ConfigurationError,
    NoMatchError,
    UnknownNameError,
)
from loka_toolkit.harness.bench import (
    DEFAULT_CATALOG,
    NOT_DRAWN,
    Bench,
    BenchSettings,
    Measured,
    chip_at,
    load_catalog,
)
from loka_toolkit.harness.isolation import IsolatedBench
from loka_toolkit.harness.ledger import Job, Ledger, resumable, row_digest, row_of, saved_at_last
from loka_toolkit.harness.moments import MomentsOfTrace
from loka_toolkit.harness.outcome import Outcome
from loka_toolkit.harness.timing import TimingPolicy, policy_for
from loka_toolkit.harness.trial import UNQUANTIZED, recipe_of
from loka_toolkit.harness.workloads import SHAPES_PER_SITE, select, workloads_of
from loka_toolkit.kernels.contract import Candidate
from loka_toolkit.numerics.recipes import parse_recipe

_GLOB = frozenset("*?[")


Progress = Callable[[str, int, int], None]
"""Told of the stage, the rows that are there and the rows planned."""


def replay(
    trace: Trace | str | Path,
    path: str | Path | None = None,
    *,
    candidates: Sequence[str] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    device: str | torch.device | None = None,
    policy: TimingPolicy | str | None = None,
    draws: int = 2,
    seed: int = 0,
    force: bool = False,
    progress: Progress | bool = False,
    shapes_per_site: int = SHAPES_PER_SITE,
    catalog: str = DEFAULT_CATALOG,
    isolate: bool = True,
) -> ReplayResults:
    """Run the GEMMs of a trace through candidate kernels on inputs drawn from its moments.

    Args:
        trace: A trace or its directory.
        path: Where the results go, and from where an interrupted or earlier run of the same trace
            is resumed: its rows are kept if workload, candidate, version, policy, chip and seed are
            the same. None keeps the results in memory only.
        candidates: Names or globs of candidates. None means the baselines and every candidate of a
            recipe on which the trace gives evidence; emulated ones only if named, because every
            row holds the emulation's error anyhow.
        include: Globs over ``FQN#CALL:ROLE`` or ``FQN`` of the sites to replay; none means all.
        exclude: Globs of sites to leave out.
        device: Where to run; by default the GPU if there is one, else the CPU.
        policy: A timing policy or its name; by default ``cuda-graph`` or ``cpu-median``.
        draws: Input draws judged per row.
        seed: Seed of the draws.
        force: Start anew instead of resuming.
        progress: Called with ``"replay"``, rows done and rows planned after every row; True prints
            a line per row to standard error.
        shapes_per_site: Token counts replayed per site, spread over those recorded.
        catalog: ``module:function`` that lists the candidates, to bring kernels of your own.
        isolate: Run candidates in a process of their own, so that one that hangs or ends its
            process costs its row only. Without it they run here, with no limit on a row's time.

    Returns:
        One row per workload and candidate. Emulated candidates are judged and not timed.

    Raises:
        ReplayError: If the trace holds no moments or no GEMMs, or ``path`` holds results of another
            trace.
        ConfigurationError: If an argument makes no sense; near misses are listed for names.
        ArtifactError: If the trace, or what stands at ``path``, cannot be read.
        KeyboardInterrupt: If interrupted; what was measured is saved first.
    """
    trace = trace if isinstance(trace, Trace) else Trace.open(trace)
    if draws < 1 or shapes_per_site < 1:
        raise ConfigurationError(
            f"draws = {draws} and shapes_per_site = {shapes_per_site} must be at least 1"
        )
    where = resolve_device(device)
    settings = BenchSettings(
        trace=str(trace.path.resolve()),
        catalog=catalog,
        device=str(where),
        policy=policy_for(policy, where),
        draws=draws,
        seed=seed,
        shapes_per_site=shapes_per_site,
        threads=torch.get_num_threads(),
    )
    MomentsOfTrace(trace)
    plan = workloads_of(trace, shapes_per_site=shapes_per_site)
    known = load_catalog(catalog)
    wanted = choose_candidates(known, candidates, trace.manifest.recipes)
    chosen_sites = set(select(plan.workloads, include, exclude))
    chip = chip_at(where)
    everything = [
        Job(index, workload, candidate, row_digest(workload, candidate, settings, chip))
        for index, workload in enumerate(plan.workloads)
        for candidate in known
    ]
    jobs = [j for j in everything if j.workload in chosen_sites and j.candidate.name in wanted]
    facts = ReplayFacts(
        created=timestamp(),
        environment=_environment_of(where),
        trace_digest=trace.digest,
        config={
            "candidates": list(wanted),
            "include": list(include),
            "exclude": list(exclude),
            "device": str(where),
            "draws": draws,
            "seed": seed,
            "shapes_per_site": shapes_per_site,
            "threads": settings.threads,
            "catalog": catalog,
            "not_dispatchable": list(plan.not_dispatchable),
            "shapes_left_out": plan.shapes_left_out,
        },
        policy=settings.policy.name,
        policy_description=settings.policy.description,
        complete=False,
    )
    destination = None if path is None else Path(path)
    kept = {} if force or destination is None else resumable(destination, trace)
    # Rows outside of this run's selection stay too, if this run would measure them the same way.
    rows = {job.digest: kept[job.digest] for job in everything if job.digest in kept}
    ledger = Ledger(destination, facts, rows, [job.digest for job in everything])
    done = sum(job.digest in rows for job in jobs)
    with saved_at_last(ledger), _bench(settings, isolate) as measure:
        for job in jobs:
            if job.digest in ledger.rows:
                continue
            row = row_of(job, measure(job), chip)
            ledger.add(row)
            done += 1
            if progress is True:
                _print_line(row, done, len(jobs))
            elif progress is not False:
                progress("replay", done, len(jobs))
        ledger.complete()
    return ledger.results()


def choose_candidates(
    known: Sequence[Candidate], wanted: Sequence[str] | None, recipes: Sequence[str]
) -> tuple[str, ...]:
    """Return the names of the candidates asked for, in the order of the catalog.

    Args:
        known: The catalog.
        wanted: Names or globs, or None for the default.
        recipes: The recipes on which the trace gives evidence, which make the default.

    Raises:
        UnknownNameError: If a name does not exist; near misses are listed.
        NoMatchError: If a glob matches nothing.
        ConfigurationError: If no candidate is asked for.
    """
    names = [candidate.name for candidate in known]
    if wanted is None:
        judged = [parse_recipe(name) for name in recipes if name not in UNQUANTIZED]
        default = tuple(
            candidate.name
            for candidate in known
            if not candidate.emulated
            and (
                (recipe := recipe_of(candidate)) is None
                or any(found.is_covered_by(recipe) for found in judged)
            )
        )
        if not default:
            raise NoMatchError("candidate", "recipes of the trace", names)
        return default
    if isinstance(wanted, str) or not wanted:
        raise ConfigurationError(
            f"candidates = {wanted!r} must be a sequence of at least one name or glob"
        )
    chosen: set[str] = set()
    for pattern in wanted:
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matched and _GLOB.isdisjoint(pattern):
            raise UnknownNameError("candidate", pattern, names)
        if not matched:
            raise NoMatchError("candidate", pattern, names)
        chosen.update(matched)
    return tuple(name for name in names if name in chosen)


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return the device to run on, with its index if it is a GPU.

    Raises:
        ConfigurationError: If there is no such device here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ConfigurationError(f"device {device!r} is none; give cpu, cuda or cuda:N") from None
    if found.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = found.index or 0
    if found.type != "cuda" or index >= count:
        raise ConfigurationError(
            f"device {str(found)!r} is not here ({count} CUDA devices); "
            "use device='cpu', or estimate() for a chip that you do not have"
        )
    return torch.device("cuda", index)


class _Measure(Protocol):
    def __call__(self, job: Job) -> Measured: ...


@contextlib.contextmanager
def _bench(settings: BenchSettings, isolate: bool) -> Iterator[_Measure]:
    if isolate:
        with IsolatedBench(settings) as isolated:
            yield lambda job: isolated.measure(job.index, job.candidate.name)
        return
    here = Bench(settings)
    lost: list[str] = []

    def measure(job: Job) -> Measured:
        if lost:
            detail = f"not run: an earlier candidate left the GPU unusable ({lost[0]})"
            return Measured(Outcome(Status.CRASHED, detail), NOT_DRAWN)
        measured = here.measure(job.workload, job.candidate)
        lost.extend([measured.unusable] if measured.unusable else [])
        return measured

    yield measure


def _environment_of(device: torch.device) -> Environment:
    found = current_environment()
    if device.type == "cpu":
        return msgspec.structs.replace(found, chip=CPU_CHIP, capability=None, driver=None)
    return found


def _print_line(row: ReplayRow, done: int, total: int) -> None:
    shape = f"{row.batch}x{row.m}x{row.n}x{row.k}" if row.batch != 1 else f"{row.m}x{row.n}x{row.k}"
    note = f": {row.detail}" if row.detail else ""
    print(
        f"[{done}/{total}] {row.site} {shape} {row.candidate}: {row.status}{note}",
        file=sys.stderr,
    )
