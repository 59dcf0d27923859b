"""Choose: which safe candidate runs each site, layer by layer, under an objective."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from loka_toolkit.artifacts.dispatch_table import (
    ANY_CALL,
    Entry,
    LayerPlan,
    Miss,
    MissReason,
    Objective,
)
from loka_toolkit.artifacts.dispatch_table import Evidence as EntryEvidence
from loka_toolkit.artifacts.replay_results import ReplayRow
from loka_toolkit.artifacts.safety_map import FAST_SPEEDUP, Cell, SpeedEvidence, Verdict
from loka_toolkit.artifacts.sites import Role, token_axis
from loka_toolkit.dispatch.consistency import DYNAMIC, FALLBACK, STATIC
from loka_toolkit.dispatch.objectives import (
    Picked,
    Predict,
    cover,
    fastest_default,
    measured_fastest,
    predicted_fastest,
)
from loka_toolkit.dispatch.options import (
    LINEAR,
    Evidence,
    Group,
    Option,
    Refusal,
    group_cells,
    options_for,
)
from loka_toolkit.dispatch.plans import layer_plan
from loka_toolkit.dispatch.signatures import BATCH_AXIS, Signature

_LAYOUTS = {
    (Role.FWD, True): "row,column",
    (Role.DGRAD, True): "row,row",
    (Role.WGRAD, True): "column,row",
    (Role.FWD, False): "row,row",
    (Role.GRAD_A, False): "row,column",
    (Role.GRAD_B, False): "column,row",
}
"""Layouts of A and B where the operands are row-major; the flag says whether one is a parameter."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen.

    Attributes:
        entries: Sites that run a candidate.
        layers: Cast plan of every layer with an entry.
        misses: Every other site, with its reason.
    """

    entries: tuple[Entry, ...]
    layers: tuple[LayerPlan, ...]
    misses: tuple[Miss, ...]


def choose(
    cells: Iterable[Cell],
    evidence: Evidence,
    objective: Objective,
    *,
    baselines: Sequence[ReplayRow] = (),
    predict: Predict | None = None,
    excluded: frozenset[str] = frozenset(),
) -> Choice:
    """Choose a candidate, or the default, for every site.

    Args:
        cells: Cells of the safety map.
        evidence: What else is known: candidates, replay rows and static scales.
        objective: What to choose by.
        baselines: Replay rows of 16- and 32-bit kernels on the same chip; ``speed`` needs them.
        predict: Predicted speed-up; ``roofline`` needs it.
        excluded: Sites that the user left out.
    """
    layers_of: dict[tuple[str, Signature | None, bool], list[Group]] = {}
    for group in group_cells(cells):
        key = (group.fqn, group.signature, group.cells[0].dispatchable)
        layers_of.setdefault(key, []).append(group)
    default_us = fastest_default(baselines)
    entries: list[Entry] = []
    layers: list[LayerPlan] = []
    misses: list[Miss] = []
    for groups in layers_of.values():
        options: dict[Role, tuple[Option, ...]] = {}
        by_role = {group.role: group for group in groups}
        for group in groups:
            found = _options_unless_excluded(group, evidence, excluded)
            if isinstance(found, tuple):
                options[group.role] = found
            else:
                misses += _misses(group, found)
        if objective is Objective.COVERAGE:
            picked, passed = cover(options, default_us)
        elif objective is Objective.ROOFLINE:
            if predict is None:
                raise TypeError("the objective roofline needs a prediction")
            picked, passed = predicted_fastest(options, predict)
        else:
            picked, passed = measured_fastest(options, default_us)
        for role, refusal in passed.items():
            misses += _misses(by_role[role], dict.fromkeys(by_role[role].calls, refusal))
        for role, choice in picked.items():
            entries += _entries(by_role[role], choice, objective)
        layers += _layer_plans(groups, picked)
    return Choice(tuple(entries), tuple(layers), tuple(misses))


def token_interval(role: Role, tokens: Sequence[int]) -> tuple[int, int]:
    """Return the least and largest token count for which a verdict holds.

    Forward and dgrad compute each row of the output by itself: fewer rows than recorded change
    nothing but the tensor's amax, which only falls, so the interval begins at 1. The contraction of
    wgrad runs over the tokens, so its error depends on how many there are: it holds down to half.
    A product of two activations computes each product of its batch by itself, in all three roles.
    All end at twice the largest count seen; beyond it rarer and larger values than any recorded
    one are to be expected.

    Args:
        role: The role.
        tokens: Token counts recorded, one per call; for a product of two activations the numbers
            of products.
    """
    upper = max(1, 2 * max(tokens))
    if role is Role.WGRAD:
        return max(1, math.ceil(min(tokens) / 2)), upper
    return 1, upper


def _options_unless_excluded(
    group: Group, evidence: Evidence, excluded: frozenset[str]
) -> tuple[Option, ...] | Mapping[int, Refusal]:
    left_out = [
        call for call, cell in zip(group.calls, group.cells, strict=True) if cell.site in excluded
    ]
    if left_out:
        everyone = len(left_out) == len(group.calls)
        calls = ", ".join(map(str, left_out))
        detail = (
            "left out by the patterns of include and exclude"
            if everyone
            else (
                f"call {calls} is left out by the patterns, and the calls of a module run together"
            )
        )
        return dict.fromkeys(group.calls, Refusal(MissReason.EXCLUDED, detail))
    return options_for(group, evidence)


def _layer_plans(groups: Sequence[Group], picked: Mapping[Role, Picked]) -> list[LayerPlan]:
    if not picked:
        return []
    recipes = {role: choice.option.recipe for role, choice in picked.items()}
    first = groups[0]
    if first.cells[0].module_type == LINEAR:
        return [layer_plan(first.fqn, ANY_CALL, recipes)]
    has_parameter = first.cells[0].weight is not None
    calls = dict.fromkeys(call for group in groups if group.role in picked for call in group.calls)
    return [layer_plan(first.fqn, c, recipes, has_parameter=has_parameter) for c in calls]


def _misses(group: Group, refusals: Mapping[int, Refusal]) -> list[Miss]:
    found = []
    for call, refusal in refusals.items():
        cell = next(iter(group.calls[call].values()))
        found.append(
            Miss(
                fqn=group.fqn,
                call=call,
                role=group.role.value,
                reason=refusal.reason,
                detail=refusal.detail,
                weight=cell.weight,
                batch=cell.batch,
                m=cell.m,
                n=cell.n,
                k=cell.k,
            )
        )
    return found


def _entries(group: Group, picked: Picked, objective: Objective) -> list[Entry]:
    """Return the entry of an nn.Linear for all its calls, or one per call of another module."""
    together = _entry(group, picked, objective)
    if group.cells[0].module_type == LINEAR:
        return [together]
    option, entries = picked.option, []
    for number, call in enumerate(group.calls):
        evidence = msgspec.structs.replace(
            together.evidence,
            p_exceed=option.cells[number].p_exceed,
            replay_row=option.rows[number].workload_digest if option.rows else None,
        )
        entries.append(msgspec.structs.replace(together, call=call, evidence=evidence))
    return entries


def _entry(group: Group, picked: Picked, objective: Objective) -> Entry:
    option, first = picked.option, picked.option.cells[0]
    has_parameter = first.weight is not None
    axis = token_axis(group.role) if has_parameter else BATCH_AXIS
    sizes = {"m": "m", "k": "k", BATCH_AXIS: "batch"}[axis or BATCH_AXIS]
    tokens = [int(getattr(cell, sizes)) for cell in option.cells]
    least, most = token_interval(group.role, tokens)
    versions = [row.version for row in option.rows] or [option.candidate.version()]
    version = None if versions[0] is None else str(versions[0])
    return Entry(
        fqn=group.fqn,
        call=ANY_CALL,
        role=group.role.value,
        token_axis=axis,
        tokens_min=least,
        tokens_max=most,
        m=None if axis == "m" else first.m,
        n=first.n,
        k=None if axis == "k" else first.k,
        batch=max(cell.batch for cell in option.cells),
        dtype=first.dtype,
        layout=_LAYOUTS[(group.role, has_parameter)],
        candidate=option.candidate.name,
        library=option.candidate.library,
        library_version=version,
        recipe=option.recipe.name,
        scale_policy=STATIC if option.recipe.has_static_scale else DYNAMIC,
        scale_a=option.scale_a,
        scale_b=option.scale_b,
        fallback=FALLBACK,
        evidence=EntryEvidence(
            verdict=Verdict.SAFE.value,
            p_exceed=option.p_exceed,
            recipe_judged=option.judged.name,
            numerics="measured" if option.rows else "none",
            speed=picked.evidence.value,
            speedup=picked.speedup,
            replay_row=",".join(row.workload_digest for row in option.rows) or None,
            statement=_statement(picked, objective),
        ),
        weight=first.weight,
    )


def _statement(picked: Picked, objective: Objective) -> str:
    if picked.evidence is SpeedEvidence.MEASURED and picked.speedup is not None:
        if objective is not Objective.COVERAGE:
            return f"measured {picked.speedup:.2f}x of the default, casts included"
        if picked.speedup < FAST_SPEEDUP:
            return f"not measured as faster: {picked.speedup:.2f}x of the default, casts included"
        return f"measured {picked.speedup:.2f}x of the default, casts included; chosen for coverage"
    if picked.evidence is SpeedEvidence.PREDICTED and picked.speedup is not None:
        return f"predicted {picked.speedup:.2f}x of the default by roofline; not measured as faster"
    replayed = "right in replay" if picked.option.rows else "not replayed on this chip"
    return f"not measured as faster; {replayed}"
