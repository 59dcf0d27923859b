"""Options: the candidates that may serve a site, or the reason why none may.

Calls that cannot be told apart when they run are judged together: all calls of an ``nn.Linear``,
and of any other module those with one signature. An option must be safe, and must have passed
replay where there is one, at every one of them in that role.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch

from loka_toolkit.artifacts.dispatch_table import MissReason
from loka_toolkit.artifacts.map_facts import OperandScale
from loka_toolkit.artifacts.replay_results import ReplayRow, Status
from loka_toolkit.artifacts.safety_map import Cell, Verdict
from loka_toolkit.artifacts.sites import GEMM_OPERANDS, Role
from loka_toolkit.dispatch.plans import LINEAR_ROLES
from loka_toolkit.dispatch.signatures import Signature, signature_of
from loka_toolkit.errors import UnknownNameError
from loka_toolkit.kernels.contract import Candidate, Chip, Problem
from loka_toolkit.numerics.recipes import (
    Accumulation,
    Recipe,
    Scaling,
    all_recipes,
)

LINEAR = "Linear"
"""Class name of the modules that are routed by their class, all calls together."""

MAX_SCALE_RATIO = 2.0
"""Largest ratio of two calls' static scales that one scale may stand for. Static scales usually
leave a headroom of 8, and the error of E4M3 hardly changes up to a headroom of 16."""

_KNOWN = {name: recipe for name, recipe in all_recipes().items() if not recipe.is_baseline}

_STATUS_REASONS: dict[Status, MissReason] = {
    Status.WRONG_NUMERICS: MissReason.UNSAFE,
    Status.UNSUPPORTED: MissReason.SHAPE,
    Status.KERNEL_ABSENT: MissReason.KERNEL_ABSENT,
    Status.FAILED_TO_COMPILE: MissReason.KERNEL_ABSENT,
    Status.OUT_OF_MEMORY: MissReason.KERNEL_ABSENT,
    Status.CRASHED: MissReason.KERNEL_ABSENT,
    Status.TIMED_OUT: MissReason.KERNEL_ABSENT,
}


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What is known about the sites.

    Attributes:
        chip: Chip the table is for.
        candidates: Kernels considered.
        rows: Replay rows of that chip by (site, candidate); None without a replay on it.
        scales: Static scales by (layer, operand).
        check_installed: Whether this machine is the target, so that an absent library counts.
    """

    chip: Chip
    candidates: Sequence[Candidate]
    rows: Mapping[tuple[str, str], ReplayRow] | None
    scales: Mapping[tuple[str, str], OperandScale]
    check_installed: bool


@dataclasses.dataclass(frozen=True)
class Group:
    """The sites of one module in one role, over all calls that cannot be told apart.

    Attributes:
        fqn: Module path.
        role: The role.
        calls: Cells by call, each a mapping from recipe name to cell.
        signature: What the products are known by; None for all calls of an ``nn.Linear``.
    """

    fqn: str
    role: Role
    calls: Mapping[int, Mapping[str, Cell]]
    signature: Signature | None = None

    @property
    def cells(self) -> tuple[Cell, ...]:
        """One cell per call, for what does not depend on the recipe."""
        return tuple(next(iter(cells.values())) for cells in self.calls.values())


@dataclasses.dataclass(frozen=True)
class Option:
    """A candidate that may serve a group.

    Attributes:
        candidate: The kernel.
        recipe: Its recipe.
        judged: The recipe whose verdicts it stands on.
        cells: The cells of those verdicts, one per call.
        rows: Replay rows, one per call; empty without a replay.
        scale_a: Static decode scale of A, or None.
        scale_b: Static decode scale of B, or None.
    """

    candidate: Candidate
    recipe: Recipe
    judged: Recipe
    cells: tuple[Cell, ...]
    rows: tuple[ReplayRow, ...]
    scale_a: float | None = None
    scale_b: float | None = None

    @property
    def p_exceed(self) -> float | None:
        """The worst call's exceedance rate, or None where one is unknown."""
        known = [cell.p_exceed for cell in self.cells if cell.p_exceed is not None]
        return max(known) if len(known) == len(self.cells) else None

    @property
    def preference(self) -> tuple[float, str]:
        """Sort key: the least exceedance rate first, then the name."""
        return (2.0 if self.p_exceed is None else self.p_exceed, self.candidate.name)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a group, or one call of it, gets no candidate.

    Attributes:
        reason: The reason.
        detail: One sentence.
        depth: How far a candidate got: 0 not here, 1 not for this product, 2 failed in replay,
            3 lacks a scale.
    """

    reason: MissReason
    detail: str
    depth: int = 0


Refusals = Mapping[int, Refusal]


def group_cells(cells: Iterable[Cell]) -> tuple[Group, ...]:
    """Group the cells by module, by what is known of them when they run, and by role, in order."""
    found: dict[tuple[str, str, Signature | None, bool], dict[int, dict[str, Cell]]] = {}
    for cell in cells:
        signature = None if cell.module_type == LINEAR else signature_of(cell)
        # What no kernel can stand in for is not caught, and so is told apart.
        apart = cell.dispatchable or cell.module_type == LINEAR
        by_call = found.setdefault((cell.fqn, cell.role, signature, apart), {})
        by_call.setdefault(cell.call, {})[cell.recipe] = cell
    return tuple(
        Group(fqn, Role(role), calls, signature)
        for (fqn, role, signature, _), calls in found.items()
    )


def options_for(group: Group, evidence: Evidence) -> tuple[Option, ...] | Refusals:
    """Return the candidates that may serve a group, or for every call why none may."""
    refused = _structural_refusals(group)
    if refused is not None:
        return refused
    safe = {call: _safe_recipes(cells) for call, cells in group.calls.items()}
    if not any(safe.values()):
        return {call: _not_safe(cells) for call, cells in group.calls.items()}
    common = set.intersection(*(set(found) for found in safe.values()))
    if not common:
        return dict.fromkeys(group.calls, _conflict(group, safe))
    options: list[Option] = []
    refusals: list[Refusal] = []
    for candidate in evidence.candidates:
        judged = _best_covered(candidate, group, common)
        if judged is None:
            continue
        outcome = _consider(candidate, judged, group, evidence)
        if isinstance(outcome, Option):
            options.append(outcome)
        else:
            refusals.append(outcome)
    if options:
        return tuple(sorted(options, key=lambda option: option.preference))
    if not refusals:
        names = " or ".join(sorted(common))
        refusals = [
            Refusal(
                MissReason.KERNEL_ABSENT,
                f"no candidate computes {group.role} in {names}, the recipes that are safe here",
            )
        ]
    return dict.fromkeys(group.calls, _joined(refusals))


def problem_of(cell: Cell) -> Problem:
    """Return the product that a site computes."""
    dtype, parameter = torch_dtype(cell.dtype), None if cell.weight is not None else False
    return Problem(Role(cell.role), cell.batch, cell.m, cell.n, cell.k, dtype, parameter)


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that an artifact names, for example ``bfloat16``.

    Raises:
        UnknownNameError: If torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnknownNameError("dtype", name, ("float32", "bfloat16", "float16"))
    return dtype


def _structural_refusals(group: Group) -> Refusals | None:
    """Return why no kernel may stand in, per call, or None.

    One module may compute products of several kinds, so each call is judged by itself; a call that
    could be replaced but for the others says so, since the calls of a module run together.
    """
    is_layer = next(iter(group.cells)).module_type == LINEAR
    found = {
        call: why
        for call, cell in zip(group.calls, group.cells, strict=True)
        if (why := _why_not_replaceable(cell, is_layer=is_layer)) is not None
    }
    if found:
        others = ", ".join(map(str, found))
        detail = f"the calls of a module run together, and call {others} cannot be replaced"
        together = Refusal(MissReason.CONFLICT, detail)
        refused = {call: Refusal(MissReason.NOT_REPLACEABLE, why) for call, why in found.items()}
        return {call: refused.get(call, together) for call in group.calls}
    if len({_fixed_facts(cell, cell.weight) for cell in group.cells}) > 1:
        detail = "its calls differ in dtype or in the dimensions that are not the token count"
        return dict.fromkeys(group.calls, Refusal(MissReason.CONFLICT, detail))
    return None


def _why_not_replaceable(cell: Cell, *, is_layer: bool) -> str | None:
    """Return why no kernel may stand in for the product of one call, or None."""
    if not cell.dispatchable:
        return f"no kernel can stand in for this product of {cell.module_type}"
    if is_layer and cell.weight is None:
        return "a product of two activations in an nn.Linear, which is routed by its class"
    if is_layer and (cell.role not in LINEAR_ROLES or cell.batch != 1):
        return f"{cell.role} with a batch of {cell.batch} is no product of nn.Linear"
    if signature_of(cell) is None:
        return f"{cell.role} with a batch of {cell.batch} is no product that can be caught"
    return None


def _safe_recipes(cells: Mapping[str, Cell]) -> dict[str, Cell]:
    return {
        name: cell
        for name, cell in cells.items()
        if cell.verdict is Verdict.SAFE and name in _KNOWN
    }


def _not_safe(cells: Mapping[str, Cell]) -> Refusal:
    cells = {name: cell for name, cell in cells.items() if name in _KNOWN} or cells
    unsafe = all(cell.verdict is Verdict.UNSAFE for cell in cells.values())
    pool = [cell for cell in cells.values() if (cell.verdict is Verdict.UNSAFE) == unsafe] or list(
        cells.values()
    )
    best = min(pool, key=lambda c: (2.0 if c.p_exceed is None else c.p_exceed, c.recipe))
    reason = MissReason.UNSAFE if unsafe else MissReason.INSUFFICIENT
    return Refusal(reason, f"{best.recipe}, its best recipe: {best.reason}")


def _conflict(group: Group, safe: Mapping[int, Mapping[str, Cell]]) -> Refusal:
    parts = []
    for call, cells in group.calls.items():
        names = ", ".join(sorted(safe[call]))
        parts.append(f"call {call} {'safe in ' + names if names else _not_safe(cells).reason}")
    return Refusal(MissReason.CONFLICT, f"no recipe is safe at every call: {'; '.join(parts)}")


def _best_covered(candidate: Candidate, group: Group, common: set[str]) -> Recipe | None:
    """Return the safe recipe of least exceedance rate whose verdict holds for the candidate."""
    if candidate.emulated or group.role not in candidate.roles or candidate.recipe not in _KNOWN:
        return None
    recipe = _KNOWN[candidate.recipe]
    covered = [_KNOWN[name] for name in common if _KNOWN[name].is_covered_by(recipe)]

    def key(judged: Recipe) -> tuple[float, int]:
        rates = [cells[judged.name].p_exceed for cells in group.calls.values()]
        worst = max(2.0 if rate is None else rate for rate in rates)
        return worst, -list(Accumulation).index(judged.accumulation)

    return min(covered, key=key) if covered else None


def _consider(
    candidate: Candidate, judged: Recipe, group: Group, evidence: Evidence
) -> Option | Refusal:
    if evidence.check_installed and candidate.version() is None:
        detail = f"{candidate.name} needs {candidate.library}, which is not installed"
        return Refusal(MissReason.KERNEL_ABSENT, detail)
    cells = tuple(by_recipe[judged.name] for by_recipe in group.calls.values())
    for cell in cells:
        why = candidate.supports(problem_of(cell), evidence.chip)
        if why is not None:
            return Refusal(MissReason.SHAPE, f"{candidate.name} does not take it: {why}", depth=1)
    rows: list[ReplayRow] = []
    if evidence.rows is not None:
        for cell in cells:
            row = _replayed(candidate, cell, evidence.rows.get((cell.site, candidate.name)))
            if isinstance(row, Refusal):
                return row
            rows.append(row)
    recipe = _KNOWN[candidate.recipe]
    option = Option(candidate, recipe, judged, cells, tuple(rows))
    return _with_static_scales(option, group, evidence) if _is_static(recipe) else option


def _replayed(candidate: Candidate, cell: Cell, row: ReplayRow | None) -> ReplayRow | Refusal:
    if row is None:
        detail = f"{candidate.name} was not replayed at {cell.site}"
        detail = f"{detail}: replay it, or build without a replay"
        return Refusal(MissReason.INSUFFICIENT, detail, depth=2)
    replayed, recorded = _fixed_facts(row, cell.weight), _fixed_facts(cell, cell.weight)
    if replayed != recorded:
        detail = f"{candidate.name} was replayed with {replayed}, and the site has {recorded}"
        detail = f"{detail}: replay it"
        return Refusal(MissReason.INSUFFICIENT, detail, depth=2)
    if row.status is not Status.OK:
        why = f": {row.detail}" if row.detail else ""
        detail = f"{candidate.name} is {row.status} in replay{why}"
        return Refusal(_STATUS_REASONS[row.status], detail, depth=2)
    return row


def _fixed_facts(site: Cell | ReplayRow, weight: str | None) -> str:
    """Return what does not depend on the token count, as text."""
    if weight is None:
        return f"m={site.m} n={site.n} k={site.k} {site.dtype}"
    width = f"m={site.m}" if site.role == Role.WGRAD.value else f"k={site.k}"
    return f"batch={site.batch} n={site.n} {width} {site.dtype}"


def _is_static(recipe: Recipe) -> bool:
    return recipe.has_static_scale


def _with_static_scales(option: Option, group: Group, evidence: Evidence) -> Option | Refusal:
    scales: list[float | None] = []
    recipe = option.recipe
    sides = zip(
        GEMM_OPERANDS[(group.role, option.cells[0].weight is not None)],
        (recipe.format_a, recipe.format_b),
        recipe.scalings,
        strict=True,
    )
    for operand, format_name, scaling in sides:
        if scaling is not Scaling.STATIC:
            scales.append(None)
            continue
        found = []
        for call in group.calls:
            entry = evidence.scales.get((f"{group.fqn}#{call}", operand.value))
            if entry is None or format_name not in entry.scale:
                detail = (
                    f"{option.candidate.name}: the safety map has no static {format_name} scale "
                    f"for {operand} of call {call}"
                )
                return Refusal(MissReason.INSUFFICIENT, detail, depth=3)
            found.append(entry.scale[format_name])
        if max(found) > MAX_SCALE_RATIO * min(found):
            detail = (
                f"{option.candidate.name}: the static scales of {operand} differ between calls by "
                f"{max(found) / min(found):.3g}; the limit is {MAX_SCALE_RATIO:g}"
            )
            return Refusal(MissReason.CONFLICT, detail, depth=3)
        scales.append(max(found))
    return dataclasses.replace(option, scale_a=scales[0], scale_b=scales[1])


def _joined(refusals: Sequence[Refusal]) -> Refusal:
    """Return the reason of the candidates that came furthest (the first on a tie), all details."""
    depth = max(refusal.depth for refusal in refusals)
    furthest = [refusal for refusal in refusals if refusal.depth == depth]
    details = dict.fromkeys(refusal.detail for refusal in furthest)
    return Refusal(furthest[0].reason, "; ".join(details), depth)
