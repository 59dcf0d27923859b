"""Cast plans: which casts the products of a layer need, and what they cost together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from loka_toolkit.artifacts.dispatch_table import LayerPlan, OperandPlan
from loka_toolkit.artifacts.sites import GEMM_OPERANDS, Operand, Role
from loka_toolkit.numerics.recipes import Recipe

LINEAR_ROLES = (Role.FWD, Role.DGRAD, Role.WGRAD)
"""Roles of a product with a parameter, in the order in which they run."""

ACTIVATION_ROLES = (Role.FWD, Role.GRAD_A, Role.GRAD_B)
"""Roles of a product of two activations, in the order in which they run."""

_LAYOUTS: dict[tuple[Role, bool], tuple[str, str]] = {
    (Role.FWD, True): ("row", "row"),
    (Role.DGRAD, True): ("row", "column"),
    (Role.WGRAD, True): ("column", "column"),
    (Role.FWD, False): ("row", "column"),
    (Role.GRAD_A, False): ("row", "row"),
    (Role.GRAD_B, False): ("column", "column"),
}
"""Layout in which each factor's operand is written, seen as x[T,I], w[O,I], g[T,O], and as a[M,K],
b[K,N], g[M,N] for a product of two activations; the flag says whether one factor is a parameter.

FP8 tensor cores (SM89 to SM100) and ``torch._scaled_mm`` read both factors along the contraction:
A row-major, B column-major. So fwd wants x and w as they are, dgrad wants w transposed, and wgrad
wants g and x transposed; with activations fwd wants b transposed, grad_a = g b^T both as they are,
and grad_b = a^T g both transposed.
"""


@dataclasses.dataclass(frozen=True)
class Cast:
    """One FP8 copy of an operand; two products that need equal copies share one.

    Attributes:
        operand: The tensor.
        format: Format written.
        scaling: Grain of the scale.
        layout: ``row`` or ``column``, of the operand as x[T,I], w[O,I] or g[T,O]; with activations
            as a[M,K], b[K,N] or g[M,N].
    """

    operand: Operand
    format: str
    scaling: str
    layout: str


def casts_of(role: Role, recipe: Recipe, *, has_parameter: bool = True) -> tuple[Cast, Cast]:
    """Return the casts of A and B that a product needs.

    Args:
        role: The role.
        recipe: The recipe.
        has_parameter: Whether one factor of the layer is a parameter.
    """
    operands = GEMM_OPERANDS[(role, has_parameter)]
    layouts = _LAYOUTS[(role, has_parameter)]
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


def layer_plan(
    fqn: str, call: int | str, chosen: Mapping[Role, Recipe], *, has_parameter: bool = True
) -> LayerPlan:
    """Return the cast plan of a layer of which ``chosen`` roles run in FP8.

    Every cast is a stand-alone kernel that reads the original operand, in forward and in backward.

    Args:
        fqn: Module path.
        call: Index of the product in the module, or ``*``.
        chosen: Recipe per role.
        has_parameter: Whether one factor is a parameter.
    """
    roles = LINEAR_ROLES if has_parameter else ACTIVATION_ROLES
    casts = [
        cast
        for role in roles
        if role in chosen
        for cast in casts_of(role, chosen[role], has_parameter=has_parameter)
    ]
    operands = (Operand.X, Operand.W) if has_parameter else (Operand.A, Operand.B)
    plans = {}
    for operand in (*operands, Operand.G):
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
