"""Objectives: of the candidates that may serve a layer's roles, which do."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from loka_toolkit.artifacts.dispatch_table import MissReason
from loka_toolkit.artifacts.replay_results import ReplayRow, Status
from loka_toolkit.artifacts.safety_map import FAST_SPEEDUP, SpeedEvidence
from loka_toolkit.artifacts.sites import Role
from loka_toolkit.dispatch.options import Option, Refusal, problem_of
from loka_toolkit.dispatch.plans import Cast, casts_of, shared_cast_saving_us
from loka_toolkit.kernels.contract import Problem
from loka_toolkit.numerics.recipes import DEFAULT_RECIPES, Recipe

_SHORTEST_US = 1e-3
"""No clock resolves less; it keeps a cast that timed longer than its product from giving less."""

Predict = Callable[[Problem, Recipe], float | None]
"""Predicted speed-up of a product over the default precision, casts included, or None."""


@dataclasses.dataclass(frozen=True)
class Picked:
    """A candidate that was chosen for a role.

    Attributes:
        option: The candidate and what it stands on.
        speedup: Time of the default over its time, casts included, or None.
        evidence: Where the speed-up comes from.
    """

    option: Option
    speedup: float | None
    evidence: SpeedEvidence


Decision = tuple[dict[Role, Picked], dict[Role, Refusal]]
"""The roles of a layer that were given a candidate, and why the others were not."""


def cover(options: Mapping[Role, tuple[Option, ...]], default_us: Mapping[str, float]) -> Decision:
    """Take the candidate of least exceedance rate for every role, whether faster or not."""
    picked = {}
    for role, found in options.items():
        best = found[0]
        default = _default_time(best, default_us)
        time = _own_time(best)
        speedup = default / time if default is not None and time else None
        picked[role] = Picked(
            best, speedup, SpeedEvidence.NONE if speedup is None else SpeedEvidence.MEASURED
        )
    return picked, {}


def predicted_fastest(options: Mapping[Role, tuple[Option, ...]], predict: Predict) -> Decision:
    """Take the candidate of largest predicted speed-up for every role where it is large enough."""
    picked: dict[Role, Picked] = {}
    passed: dict[Role, Refusal] = {}
    for role, found in options.items():
        if any(cell.batch > 1 for cell in found[0].cells):
            detail = "the roofline says nothing of a batch, which some kernels compute one by one"
            passed[role] = Refusal(MissReason.NOT_FASTER, detail)
            continue
        known = []
        for option in found:
            speedups = [predict(problem_of(cell), option.recipe) for cell in option.cells]
            if all(s is not None for s in speedups):
                known.append((min(s for s in speedups if s is not None), option))
        if not known:
            passed[role] = Refusal(MissReason.NOT_FASTER, "the roofline has no data for it")
            continue
        speedup, best = min(known, key=lambda pair: (-pair[0], pair[1].preference))
        if speedup >= FAST_SPEEDUP:
            picked[role] = Picked(best, speedup, SpeedEvidence.PREDICTED)
        else:
            passed[role] = Refusal(
                MissReason.NOT_FASTER,
                f"predicted {speedup:.2f}x of the default with {best.candidate.name}, casts "
                f"included; at least {FAST_SPEEDUP} is wanted",
            )
    return picked, passed


def measured_fastest(
    options: Mapping[Role, tuple[Option, ...]], default_us: Mapping[str, float]
) -> Decision:
    """Take the roles and candidates of a layer that save the most time together."""
    passed: dict[Role, Refusal] = {}
    timed: dict[Role, list[Option]] = {}
    default: dict[Role, float] = {}
    for role, found in options.items():
        base = _default_time(found[0], default_us)
        usable = [option for option in found if _own_time(option) is not None]
        if base is None or not usable:
            what = "the default precision" if base is None else "any safe candidate"
            passed[role] = Refusal(
                MissReason.NOT_FASTER, f"the replay holds no measured time of {what} here"
            )
        else:
            timed[role], default[role] = usable, base
    roles = list(timed)
    best: tuple[float, int, tuple[tuple[float, str], ...]] | None = None
    chosen: dict[Role, Option] = {}
    for combination in itertools.product(*([None, *timed[role]] for role in roles)):
        routed = {r: o for r, o in zip(roles, combination, strict=True) if o is not None}
        if any(_marginal_us(routed, role) * FAST_SPEEDUP > default[role] for role in routed):
            continue
        total = _layer_us(routed) + sum(default[role] for role in roles if role not in routed)
        key = (total, len(routed), tuple(option.preference for option in routed.values()))
        if best is None or key < best:
            best, chosen = key, routed
    picked = {
        role: Picked(option, default[role] / _marginal_us(chosen, role), SpeedEvidence.MEASURED)
        for role, option in chosen.items()
    }
    for role in roles:
        if role not in chosen:
            fastest = min(timed[role], key=lambda o: (_own_time(o) or 0.0, o.preference))
            time = _own_time(fastest) or math.inf
            passed[role] = Refusal(
                MissReason.NOT_FASTER,
                f"{fastest.candidate.name} takes {time:.1f} us with its casts, the default "
                f"{default[role]:.1f} us: {default[role] / time:.2f}x, and {FAST_SPEEDUP} is "
                "wanted",
            )
    return picked, passed


def fastest_default(baselines: Sequence[ReplayRow]) -> dict[str, float]:
    """Return the fastest measured time of the default precision by site, in microseconds."""
    fastest: dict[str, float] = {}
    for row in baselines:
        wanted = row.recipe in DEFAULT_RECIPES.get(row.dtype, ()) and row.status is Status.OK
        if wanted and not row.emulated and row.latency_us is not None:
            fastest[row.site] = min(row.latency_us, fastest.get(row.site, math.inf))
    return fastest


def _default_time(option: Option, default_us: Mapping[str, float]) -> float | None:
    times = [default_us.get(cell.site) for cell in option.cells]
    known = [time for time in times if time is not None]
    return sum(known) if len(known) == len(times) else None


def _own_time(option: Option) -> float | None:
    """Return the measured time of an option over its calls, casts included, in microseconds."""
    known = [row.latency_us for row in option.rows if row.latency_us is not None]
    return sum(known) if known and len(known) == len(option.cells) else None


def _layer_us(routed: Mapping[Role, Option]) -> float:
    """Return the time of the routed products of a layer, each distinct cast charged once."""
    total = sum(_own_time(option) or 0.0 for option in routed.values())
    by_call: dict[int, list[tuple[Cast, float | None]]] = {}
    for role, option in routed.items():
        has_parameter = option.cells[0].weight is not None
        cast_a, cast_b = casts_of(role, option.recipe, has_parameter=has_parameter)
        for row in option.rows:
            casts = by_call.setdefault(row.call, [])
            casts += [(cast_a, row.cast_a_us), (cast_b, row.cast_b_us)]
    return total - sum(shared_cast_saving_us(casts) for casts in by_call.values())


def _marginal_us(routed: Mapping[Role, Option], role: Role) -> float:
    """Return what one role adds to its layer, in microseconds."""
    without = {r: option for r, option in routed.items() if r is not role}
    return max(_layer_us(routed) - _layer_us(without), _SHORTEST_US)
