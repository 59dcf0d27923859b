"""What replay runs: the GEMMs of a trace, one workload per site and recorded shape."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from loka_toolkit.artifacts.sites import (
    GEMM_OPERANDS,
    Operand,
    Role,
    SiteKey,
    select_sites,
    token_axis,
)
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.errors import ArtifactCorruptError, ReplayError
from loka_toolkit.kernels.contract import Problem, Side

SHAPES_PER_SITE = 3
"""Token counts replayed per site: the smallest, the median and the largest that were recorded.
Enough to see a trend in the token count; a model with ragged batches records hundreds."""

_TRANSPOSED: dict[tuple[Role, bool], tuple[bool, bool]] = {
    (Role.FWD, True): (False, True),
    (Role.DGRAD, True): (False, False),
    (Role.WGRAD, True): (True, False),
    (Role.FWD, False): (False, False),
    (Role.GRAD_A, False): (False, True),
    (Role.GRAD_B, False): (True, False),
}
"""Whether the left and right factor is the transpose of the operand as recorded (see
``artifacts.sites.GEMM_OPERANDS``, which has the products written out)."""


@dataclasses.dataclass(frozen=True)
class Factor:
    """One factor of a workload's product.

    Attributes:
        side: Which factor.
        operand: The layer's operand that it is.
        transposed: Whether it is the transpose of the operand as recorded.
        rows: Rows of the operand as recorded: the samples that moments were taken over.
        width: Its last logical dimension: the features.
        dtype: Its dtype.
        layout: ``row``, ``column`` or ``strided``, of the factor [rows, columns].
    """

    side: Side
    operand: Operand
    transposed: bool
    rows: int
    width: int
    dtype: torch.dtype
    layout: str


@dataclasses.dataclass(frozen=True)
class Workload:
    """One GEMM as the training job runs it: out[batch, M, N] = A[batch, M, K] B[batch, K, N].

    Attributes:
        site: The site.
        problem: Dimensions, role and output dtype.
        batched: Whether the operands carry a batch dimension even if there is one product.
        a: The left factor.
        b: The right factor.
    """

    site: SiteKey
    problem: Problem
    batched: bool
    a: Factor
    b: Factor

    @property
    def dtype(self) -> str:
        """Name of the output's dtype, for example ``float32``."""
        return str(self.problem.dtype).removeprefix("torch.")

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that tells this workload from others of the same trace, as JSON values."""
        p = self.problem
        return {
            "site": str(self.site),
            "dims": [p.batch, p.m, p.n, p.k],
            "dtypes": [str(self.a.dtype), str(self.b.dtype), str(p.dtype)],
            "layouts": [self.a.layout, self.b.layout],
        }


@dataclasses.dataclass(frozen=True)
class WorkloadPlan:
    """The workloads of a trace and what was left out.

    Attributes:
        workloads: In the order of the model, the sites of a layer together.
        not_dispatchable: Names of sites that no single kernel can stand in for.
        shapes_left_out: Site name -> number of recorded shapes that are not replayed.
    """

    workloads: tuple[Workload, ...]
    not_dispatchable: tuple[str, ...]
    shapes_left_out: dict[str, int]


def workloads_of(trace: Trace, *, shapes_per_site: int = SHAPES_PER_SITE) -> WorkloadPlan:
    """Return the GEMMs of a trace.

    Args:
        trace: The trace.
        shapes_per_site: At most so many token counts of a site, spread from least to most.

    Raises:
        ReplayError: If the trace holds no GEMM that a kernel could stand in for.
        ArtifactCorruptError: If a site's role, dtype or dimensions make no sense.
    """
    rows = trace.sites.to_pylist()
    weighted = {SiteKey.parse(row["site"]).layer for row in rows if row["weight"] is not None}
    weighted |= {
        SiteKey.parse(row["site"]).layer for row in rows if row["role"] in ("dgrad", "wgrad")
    }
    by_site: dict[SiteKey, dict[tuple[Any, ...], Workload]] = {}
    barred: dict[str, None] = {}
    for row in sorted(rows, key=lambda row: int(row["first_step"])):
        key = SiteKey.parse(row["site"])
        if key.role is Role.NORM:
            continue
        if not row["dispatchable"]:
            barred[str(key)] = None
            continue
        workload = _workload(key, row, has_parameter=key.layer in weighted)
        shapes = by_site.setdefault(key, {})
        shapes.setdefault(tuple(map(str, workload.identity.values())), workload)
    if not by_site:
        raise ReplayError(
            f"trace {trace.path} holds no GEMM that a kernel could stand in for "
            f"({len(rows)} sites recorded, {len(barred)} of them not dispatchable); "
            "record a model with matrix products"
        )
    layers: dict[str, list[SiteKey]] = defaultdict(list)
    for key in by_site:
        layers[key.layer].append(key)
    chosen: list[Workload] = []
    left_out: dict[str, int] = {}
    for key in (key for keys in layers.values() for key in keys):
        shapes_found = list(by_site[key].values())
        kept = _spread(shapes_found, shapes_per_site)
        chosen.extend(kept)
        if len(kept) < len(shapes_found):
            left_out[str(key)] = len(shapes_found) - len(kept)
    return WorkloadPlan(tuple(chosen), tuple(barred), left_out)


def select(
    workloads: Sequence[Workload], include: Iterable[str] = (), exclude: Iterable[str] = ()
) -> tuple[Workload, ...]:
    """Return the workloads whose site or module path matches the globs.

    Args:
        workloads: All of them.
        include: Globs over ``FQN#CALL:ROLE`` or ``FQN``; none means all.
        exclude: Globs of those to leave out.

    Raises:
        NoMatchError: If a glob matches nothing, or nothing is left.
    """
    kept = set(select_sites((str(w.site) for w in workloads), tuple(include), tuple(exclude)))
    return tuple(w for w in workloads if str(w.site) in kept)


def _workload(key: SiteKey, row: dict[str, Any], *, has_parameter: bool) -> Workload:
    case = (key.role, has_parameter)
    if case not in GEMM_OPERANDS:
        raise ArtifactCorruptError(
            f"site {key} has the role {key.role} although its layer "
            f"{'multiplies a parameter' if has_parameter else 'has no parameter'}"
        )
    batch, m, n, k = (int(row[name]) for name in ("batch", "m", "n", "k"))
    if min(batch, m, n, k) < 0:
        raise ArtifactCorruptError(f"site {key} has a negative dimension in {(batch, m, n, k)}")
    problem = Problem(
        key.role,
        batch,
        m,
        n,
        k,
        _dtype(key, row["dtype_out"]),
        parameter=GEMM_OPERANDS[case][1] is Operand.W,
    )
    factors = []
    for side, operand, transposed, (first, last), dtype, layout in zip(
        (Side.A, Side.B),
        GEMM_OPERANDS[case],
        _TRANSPOSED[case],
        ((m, k), (k, n)),
        (row["dtype_a"], row["dtype_b"]),
        (row["layout_a"], row["layout_b"]),
        strict=True,
    ):
        rows, width = (last, first) if transposed else (first, last)
        factors.append(Factor(side, operand, transposed, rows, width, _dtype(key, dtype), layout))
    return Workload(key, problem, batch != 1 or "bmm" in row["op"], *factors)


def _dtype(key: SiteKey, name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArtifactCorruptError(f"site {key} has the dtype {name!r}, no floating-point dtype")
    return dtype


def _spread(shapes: list[Workload], most: int) -> list[Workload]:
    """Return at most ``most`` shapes, equally spread in rank by token count (else by FLOPs)."""
    if len(shapes) <= most:
        return shapes

    def size(workload: Workload) -> tuple[float, float]:
        axis = token_axis(workload.site.role)
        tokens = getattr(workload.problem, axis) if axis else 0
        return float(tokens), workload.problem.flops

    ordered = sorted(shapes, key=size)
    if most == 1:
        return [ordered[len(ordered) // 2]]
    last = len(ordered) - 1
    return [ordered[round(i * last / (most - 1))] for i in range(most)]
