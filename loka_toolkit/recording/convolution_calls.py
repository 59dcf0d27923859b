"""Calls of convolutions: what they are, and their factors, unfolded only as far as affordable."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from loka_toolkit.artifacts.sites import GEMM_OPERANDS, Role
from loka_toolkit.recording.convolution import Convolution
from loka_toolkit.recording.products import Factors, SiteShape, dtype_name, layout_of
from loka_toolkit.recording.sampling import SampledRows

aten = torch.ops.aten

CONVOLUTION = "a convolution: kernels stand in for matrix products"
TOO_LARGE = "a convolution over too many positions to unfold"

UNFOLDED_ELEMENTS = 1 << 22
"""Unfolded elements up to which all patches are made: 16 MiB in float32. Of larger ones a part is
made: enough output rows, or of wgrad, whose contraction runs over all patches, enough columns."""
LARGEST_SAMPLE = 1 << 24
"""Unfolded elements of a sample at most: 64 MiB."""


@dataclasses.dataclass(frozen=True)
class ConvolutionCall:
    """One call of a convolution or of its backward.

    Attributes:
        op: Name of the operator.
        geometry: Its sizes.
        x: Its input.
        w: Its weight.
        out: Its output; in backward the gradient of that.
        gradients: Which gradients it computed, of the input and of the weight; None in forward.
    """

    op: str
    geometry: Convolution
    x: torch.Tensor
    w: torch.Tensor
    out: torch.Tensor
    gradients: tuple[bool, bool] | None

    @property
    def flops(self) -> float:
        """Floating-point operations, of backward over the gradients computed."""
        return self.geometry.flops * (1 if self.gradients is None else sum(self.gradients))

    @property
    def unjudged(self) -> str | None:
        """Why its errors cannot be told; None if they can."""
        if not self.x.dtype.is_floating_point or self.x.layout is not torch.strided:
            return f"a convolution of dtype {dtype_name(self.x.dtype)}"
        return None

    @property
    def most_rows(self) -> int:
        """Rows of a forward sample at most, over all groups."""
        geometry = self.geometry
        return max(1, LARGEST_SAMPLE // geometry.wide_width)

    @property
    def shape(self) -> SiteShape:
        """What the table ``sites`` says of the forward product."""
        return self.shape_of(Role.FWD)

    def shape_of(self, role: Role) -> SiteShape:
        """Return what the table ``sites`` says of the product of a role."""
        batch, m, n, k = self.geometry.dims(role)
        a, b = {
            Role.FWD: (self.x, self.w),
            Role.DGRAD: (self.out, self.w),
            Role.GRAD_A: (self.out, self.w),
            Role.WGRAD: (self.out, self.x),
            Role.GRAD_B: (self.x, self.out),
        }[role]
        return SiteShape(
            op=self.op,
            batch=batch,
            m=m,
            n=n,
            k=k,
            dtype_a=dtype_name(a.dtype),
            dtype_b=dtype_name(b.dtype),
            dtype_out=dtype_name(self.out.dtype),
            layout_a=layout_of(a),
            layout_b=layout_of(b),
            flops=self.geometry.flops,
            bar=CONVOLUTION,
        )

    # Factors in canonical orientation

    def forward_factors(
        self, has_parameter: bool, sampled: SampledRows
    ) -> tuple[Factors, SampledRows]:
        """Return the factors of the forward product, and where among them the sampled rows are.

        Where patches are too many, the sampled ones, the one with the largest element, so that the
        scale is that of the whole input, and evenly spaced ones are made.
        """
        geometry, x, w = self.geometry, self.x.detach(), self._weight
        if geometry.is_transposed:
            a, place = geometry.plain_rows(x), sampled
        else:
            wanted = torch.arange(geometry.tokens) if sampled.rows is None else sampled.rows
            kept = self._kept_rows(wanted, x)
            a = geometry.wide_rows(x, kept)
            place = sampled
            if kept is not None:
                rows = torch.searchsorted(kept, wanted)
                place = SampledRows(sampled.batch, rows, sampled.examples)
        operands = GEMM_OPERANDS[Role.FWD, has_parameter]
        return Factors(Role.FWD, operands, a, w.mT, right_transposed=has_parameter), place

    def gradient_factors(self, role: Role) -> Factors | None:
        """Return the factors of a gradient; None if there are too many patches."""
        geometry, x, g = self.geometry, self.x.detach(), self.out.detach()
        has_parameter = role in (Role.DGRAD, Role.WGRAD)
        operands = GEMM_OPERANDS[role, has_parameter]
        if role in (Role.DGRAD, Role.GRAD_A):
            if geometry.is_transposed:
                left = geometry.wide_rows(g, self._kept_rows(torch.arange(0), g))
            else:
                left = geometry.plain_rows(g)
            # g[T,O] w[O,I]; of two activations g b^T, with b[I,O] as the operand.
            return Factors(role, operands, left, self._weight, right_transposed=not has_parameter)
        columns = self._kept_columns(g if geometry.is_transposed else x)
        if columns is None:
            return None
        wide = geometry.wide_columns(g if geometry.is_transposed else x, columns)
        plain = geometry.plain_rows(x if geometry.is_transposed else g)
        g_rows, x_rows = (wide, plain) if geometry.is_transposed else (plain, wide)
        if has_parameter:
            return Factors(role, operands, g_rows.mT, x_rows, left_transposed=True)
        return Factors(role, operands, x_rows.mT, g_rows, left_transposed=True)

    @property
    def _weight(self) -> torch.Tensor:
        return self.geometry.weight(self.w.detach())

    def _kept_rows(self, wanted: torch.Tensor, wide: torch.Tensor) -> torch.Tensor | None:
        geometry = self.geometry
        affordable = UNFOLDED_ELEMENTS // (geometry.groups * geometry.wide_width)
        if geometry.tokens <= affordable:
            return None
        largest, _ = geometry.largest(wide)
        spread = torch.linspace(0, geometry.tokens - 1, max(1, affordable), dtype=torch.float64)
        kept: torch.Tensor = torch.unique(
            torch.cat([spread.long(), torch.tensor([largest]), wanted])
        )
        return kept

    def _kept_columns(self, wide: torch.Tensor) -> torch.Tensor | None:
        geometry = self.geometry
        per_column = geometry.groups * geometry.tokens
        if per_column > LARGEST_SAMPLE:
            return None
        affordable = max(1, UNFOLDED_ELEMENTS // per_column)
        if geometry.wide_width <= affordable:
            return torch.arange(geometry.wide_width)
        _, largest = geometry.largest(wide)
        spread = torch.linspace(0, geometry.wide_width - 1, affordable, dtype=torch.float64)
        kept: torch.Tensor = torch.unique(torch.cat([spread.long(), torch.tensor([largest])]))
        return kept


def is_convolution(func: torch._ops.OpOverload) -> bool:
    """Whether an operator is a convolution, or the backward of one."""
    return func.overloadpacket in (aten.convolution, aten.convolution_backward)


def convolution_of(
    func: torch._ops.OpOverload, args: tuple[Any, ...], out: Any
) -> ConvolutionCall | None:
    """Return what a call of a convolution did; None if it is none."""
    packet = func.overloadpacket
    if packet is aten.convolution:
        x, w, _, stride, padding, dilation, transposed, _, groups = args[:9]
        return _call(str(func), x, w, out, stride, padding, dilation, transposed, groups, None)
    if packet is aten.convolution_backward:
        g, x, w, _, stride, padding, dilation, transposed, _, groups, mask = args[:11]
        gradients = bool(mask[0]), bool(mask[1])
        return _call(str(func), x, w, g, stride, padding, dilation, transposed, groups, gradients)
    return None


def _call(
    op: str,
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    is_transposed: bool,
    groups: int,
    gradients: tuple[bool, bool] | None,
) -> ConvolutionCall:
    wide, plain = (out, x) if is_transposed else (x, out)
    kernel = tuple(int(size) for size in w.shape[2:])

    def each(values: list[int]) -> tuple[int, ...]:
        return tuple(int(v) for v in values) * (len(kernel) if len(values) == 1 else 1)

    geometry = Convolution(
        examples=int(x.shape[0]),
        groups=int(groups),
        wide_channels=int(wide.shape[1]),
        plain_channels=int(plain.shape[1]),
        wide_size=tuple(int(size) for size in wide.shape[2:]),
        positions=tuple(int(size) for size in plain.shape[2:]),
        kernel=kernel,
        stride=each(stride)[: len(kernel)],
        padding=each(padding)[: len(kernel)],
        dilation=each(dilation)[: len(kernel)],
        is_transposed=bool(is_transposed),
    )
    return ConvolutionCall(op, geometry, x, w, out, gradients)
