"""Cast plans: which casts the products of a layer need, and what they cost together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from loka_toolkit.artifacts.dispatch_table import LayerPlan, OperandPlan
from loka_toolkit.artifacts.sites import GEMM_OPERANDS, Operand, Role
from loka_toolkit.numerics.recipes import Recipe

LINEAR_ROLES = (Role.FWD, Role.DGRAD, Role.WGRAD)
"""Roles of a product with a parameter, in the order in which they run."""

_LAYOUTS: dict[Role, tuple[str, str]] = {
    Role.FWD: ("row", "row"),
    Role.DGRAD: ("row", "column"),
    Role.WGRAD: ("column", "column"),
}
"""Layout in which each factor's operand is written, seen as x[T,I], w[O,I], g[T,O].

FP8 tensor cores (SM89 to SM100) and ``torch._scaled_mm`` read both factors along the contraction:
A row-major, B column-major. So fwd wants x and w as they are, dgrad wants w transposed, and wgrad
wants g and x transposed.
"""


@dataclasses.dataclass(frozen=True)
class Cast:
    """One FP8 copy of an operand; two products that need equal copies share one.

    Attributes:
        operand: The tensor.
        format: Format written.
        scaling: Grain of the scale.
        layout: ``row`` or ``column``, of the operand as x[T,I], w[O,I] or g[T,O].
    """

    operand: Operand
    format: str
    scaling: str
    layout: str


def casts_of(role: Role, recipe: Recipe) -> tuple[Cast, Cast]:
    """Return the casts of A and B that a product of a layer with a parameter needs."""
    operands = GEMM_OPERANDS[(role, True)]
    layouts = _LAYOUTS[role]
    return (
        Cast(operands[0], recipe.format_a, recipe.scaling_a.value, layouts[0]),
        Cast(operands[1], recipe.format_b, recipe.scaling_b.value, layouts[1]),
    )


def shared_cast_saving_us(casts: Iterable[tuple[Cast, float | None]]) -> float:
    """Return the time that sharing saves, in microseconds.

    Of casts that are equal all but the slowest are saved; one whose time is unknown saves nothing.

    Args:
        casts: Every cast of the layer's products with its own time in microseconds.
    """
    times: dict[Cast, list[float]] = {}
    for cast, time in casts:
        times.setdefault(cast, []).append(0.0 if time is None else time)
    return sum(sum(found) - max(found) for found in times.values())


def layer_plan(fqn: str, call: int | str, chosen: Mapping[Role, Recipe]) -> LayerPlan:
    """Return the cast plan of a layer of which ``chosen`` roles run in FP8.

    Every cast is a stand-alone kernel that reads the original operand, in forward and in backward.

    Args:
        fqn: Module path.
        call: Index of the product in the module, or ``*``.
        chosen: Recipe per role.
    """
    casts = [
        cast for role in LINEAR_ROLES if role in chosen for cast in casts_of(role, chosen[role])
    ]
    plans = {}
    for operand in (Operand.X, Operand.W, Operand.G):
        mine = [cast for cast in casts if cast.operand is operand]
        scalings = dict.fromkeys(cast.scaling for cast in mine)
        plans[operand.value] = OperandPlan(
            cast_by="kernel" if mine else "none",
            scaling=",".join(scalings) if mine else None,
            formats=tuple(dict.fromkeys(cast.format for cast in mine)),
            layouts=tuple(dict.fromkeys(cast.layout for cast in mine)),
            kept_for_backward="original",
        )
    return LayerPlan(fqn=fqn, call=call, operands=plans)
