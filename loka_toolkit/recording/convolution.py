"""A convolution as the matrix product that it is once its patches are unfolded (im2col).

With T = examples x output positions, a convolution multiplies patches x[T,I] by w[O,I]^T, I being
input channels x kernel and O output channels, once per group. A transposed convolution multiplies
plain pixels x[T,I] and adds up patches afterwards: there O is output channels x kernel, and the
gradient g[T,O] is what is unfolded. Of either, forward is x w^T, dgrad g w and wgrad g^T x, so the
*wide* side (x, or g of a transposed one) is the only thing that has to be made; parts of it
suffice.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch

from loka_toolkit.artifacts.sites import GEMM_OPERANDS, Role
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
class Convolution:
    """The sizes of a convolution; holds no tensor.

    Attributes:
        examples: Length of the batch dimension.
        groups: Number of groups.
        wide_channels: Channels of the side that is unfolded, over all groups.
        plain_channels: Channels of the other side.
        wide_size: Spatial size of the side that is unfolded.
        positions: Spatial size of the other side: one patch each.
        kernel: Size of the kernel.
        stride: Steps between patches.
        padding: Zeros put on either end of the wide side.
        dilation: Steps between the elements of a patch.
        is_transposed: Whether the wide side is the output.
    """

    examples: int
    groups: int
    wide_channels: int
    plain_channels: int
    wide_size: tuple[int, ...]
    positions: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    is_transposed: bool

    @property
    def tokens(self) -> int:
        """Patches, T."""
        return self.examples * math.prod(self.positions)

    @property
    def wide_width(self) -> int:
        """Elements of a patch of one group."""
        return self.wide_channels // self.groups * math.prod(self.kernel)

    @property
    def plain_width(self) -> int:
        """Channels of the other side of one group."""
        return self.plain_channels // self.groups

    @property
    def widths(self) -> tuple[int, int]:
        """Input width I and output width O of one group."""
        wide, plain = self.wide_width, self.plain_width
        return (plain, wide) if self.is_transposed else (wide, plain)

    @property
    def flops(self) -> float:
        """Floating-point operations of any of the three products."""
        return 2.0 * self.groups * self.tokens * self.wide_width * self.plain_width

    @property
    def leading(self) -> tuple[int, ...]:
        """Sizes that the rows of the batched product were flattened from."""
        head = (self.groups,) if self.groups > 1 else ()
        return (*head, self.examples, *self.positions)

    def dims(self, role: Role) -> tuple[int, int, int, int]:
        """Return batch, M, N, K of the product of a role."""
        wide_in, wide_out = self.widths
        if role is Role.FWD:
            return self.groups, self.tokens, wide_out, wide_in
        if role in (Role.DGRAD, Role.GRAD_A):
            return self.groups, self.tokens, wide_in, wide_out
        if role is Role.WGRAD:
            return self.groups, wide_out, wide_in, self.tokens
        return self.groups, wide_in, wide_out, self.tokens

    # Matrices; with one group [rows, columns], else [groups, rows, columns]

    def plain_rows(self, t: torch.Tensor) -> torch.Tensor:
        """Return the plain side [examples, channels, *positions] as [T, channels of a group]."""
        shaped = t.reshape(self.examples, self.groups, self.plain_width, -1)
        return self._squeezed(shaped.permute(1, 0, 3, 2).reshape(self.groups, self.tokens, -1))

    def wide_rows(self, t: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return patches of the wide side [examples, channels, *size] as [rows, patch].

        Args:
            t: The wide side.
            rows: Which of the T patches; None for all.
        """
        if rows is None:
            rows = torch.arange(self.tokens)
        rows = rows.to(t.device)
        needed, place = torch.unique(rows // math.prod(self.positions), return_inverse=True)
        windows = self._windows(t.index_select(0, needed))
        at = _unravelled(rows % math.prod(self.positions), self.positions)
        dims = len(self.positions)
        # Advanced indices apart from each other put their dimension first: [rows, C, *kernel].
        index: tuple[Any, ...] = (place, slice(None), *at, *(slice(None) for _ in range(dims)))
        taken = windows[index].reshape(len(rows), self.groups, self.wide_width)
        return self._squeezed(taken.permute(1, 0, 2))

    def wide_columns(self, t: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Return some elements of all patches of every group, [T, columns]."""
        columns = columns.to(t.device)
        channels = self.wide_channels // self.groups
        windows = self._windows(t)
        windows = windows.reshape(self.examples, self.groups, channels, *windows.shape[2:])
        channel, *offsets = _unravelled(columns, (channels, *self.kernel))
        every: tuple[Any, ...] = (slice(None),) * len(self.positions)
        index: tuple[Any, ...] = (slice(None), slice(None), channel, *every, *offsets)
        taken = windows[index]
        # [columns, examples, groups, *positions]
        moved = taken.reshape(len(columns), self.examples, self.groups, -1).permute(2, 1, 3, 0)
        return self._squeezed(moved.reshape(self.groups, self.tokens, len(columns)))

    def weight(self, w: torch.Tensor) -> torch.Tensor:
        """Return the weight as [O, I]."""
        if self.is_transposed:
            shaped = w.reshape(self.groups, self.plain_width, self.wide_width).mT
        else:
            shaped = w.reshape(self.groups, self.plain_width, self.wide_width)
        return self._squeezed(shaped)

    def as_output(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product [T, O] as the convolution's output [examples, channels, *size]."""
        _, width = self.widths
        if self.is_transposed:
            return self._folded(rows)
        shaped = rows.reshape(self.groups, self.examples, -1, width).permute(1, 0, 3, 2)
        return shaped.reshape(self.examples, self.plain_channels, *self.positions)

    def _folded(self, rows: torch.Tensor) -> torch.Tensor:
        """Add patches up to the wide side (col2im)."""
        dims = len(self.positions)
        padded = [n + 2 * p for n, p in zip(self.wide_size, self.padding, strict=True)]
        whole = rows.new_zeros(self.examples, self.wide_channels, *padded)
        channels = self.wide_channels // self.groups
        shape = (self.groups, self.examples, *self.positions, channels, *self.kernel)
        parts = rows.reshape(shape).movedim(1 + dims + 1, 1).movedim(2, 0)
        # [examples, groups, channels, *positions, *kernel]
        parts = parts.reshape(self.examples, self.wide_channels, *self.positions, *self.kernel)
        for offsets in itertools.product(*(range(size) for size in self.kernel)):
            at = tuple(
                slice(o * d, o * d + s * (n - 1) + 1, s)
                for o, d, s, n in zip(
                    offsets, self.dilation, self.stride, self.positions, strict=True
                )
            )
            whole[(slice(None), slice(None), *at)] += parts[(..., *offsets)]
        inside = (slice(p, p + n) for p, n in zip(self.padding, self.wide_size, strict=True))
        return whole[(slice(None), slice(None), *inside)]

    def largest(self, t: torch.Tensor) -> tuple[int, int]:
        """Return a patch and a column that hold the wide side's largest element; 0 if none does."""
        magnitude = torch.nan_to_num(t.detach().abs().float(), nan=0.0, posinf=0.0)
        at = [int(i) for i in _unravelled(magnitude.argmax().reshape(1), tuple(t.shape))]
        position, offsets = [], []
        for coordinate, axis in zip(at[2:], range(len(self.kernel)), strict=True):
            padded = coordinate + self.padding[axis]
            for offset in range(self.kernel[axis]):
                start = padded - offset * self.dilation[axis]
                index, rest = divmod(start, self.stride[axis])
                if start >= 0 and rest == 0 and index < self.positions[axis]:
                    position.append(index)
                    offsets.append(offset)
                    break
            else:
                return 0, 0  # skipped by the stride
        channel = at[1] % (self.wide_channels // self.groups)
        row = _ravelled((at[0], *position), (self.examples, *self.positions))
        return row, _ravelled((channel, *offsets), (1, *self.kernel))

    def _windows(self, t: torch.Tensor) -> torch.Tensor:
        """Return a view [examples, C, *positions, *kernel] of the padded wide side."""
        pads = [p for pad in reversed(self.padding) for p in (pad, pad)]
        padded = torch.nn.functional.pad(t, pads) if any(pads) else t.contiguous()
        strides = padded.stride()[2:]
        steps = [s * n for s, n in zip(strides, self.stride, strict=True)]
        inner = [s * n for s, n in zip(strides, self.dilation, strict=True)]
        return padded.as_strided(
            (*padded.shape[:2], *self.positions, *self.kernel),
            (*padded.stride()[:2], *steps, *inner),
        )

    def _squeezed(self, x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(0) if self.groups == 1 else x


def _unravelled(flat: torch.Tensor, shape: tuple[int, ...]) -> list[torch.Tensor]:
    return list(torch.unravel_index(flat, shape))


def _ravelled(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    flat = 0
    for i, size in zip(index, shape, strict=True):
        flat = flat * size + i
    return flat


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
        geometry, x, w = self.geometry, self.x.detach(), geometry_weight(self)
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
            return Factors(
                role, operands, left, geometry_weight(self), right_transposed=not has_parameter
            )
        columns = self._kept_columns(g if geometry.is_transposed else x)
        if columns is None:
            return None
        wide = geometry.wide_columns(g if geometry.is_transposed else x, columns)
        plain = geometry.plain_rows(x if geometry.is_transposed else g)
        g_rows, x_rows = (wide, plain) if geometry.is_transposed else (plain, wide)
        if has_parameter:
            return Factors(role, operands, g_rows.mT, x_rows, left_transposed=True)
        return Factors(role, operands, x_rows.mT, g_rows, left_transposed=True)

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


def geometry_weight(call: ConvolutionCall) -> torch.Tensor:
    """Return a call's weight as [O, I]."""
    return call.geometry.weight(call.w.detach())


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


def tokens_at(geometry: Convolution, gradient: torch.Tensor, sampled: SampledRows) -> torch.Tensor:
    """Return sampled rows of the gradient of a convolution's output, [rows, O].

    Args:
        geometry: The convolution.
        gradient: As aten has it, [examples, channels, *size].
        sampled: Rows of the batched product [groups, T, O].
    """
    batch = sampled.batch
    rows = sampled.rows
    taken = (
        geometry.wide_rows(gradient, rows)
        if geometry.is_transposed
        else _select(geometry.plain_rows(gradient), rows, -2)
    )
    if geometry.groups > 1:
        taken = _select(taken, batch, 0)
    return taken.reshape(-1, taken.shape[-1])


def _select(x: torch.Tensor, index: torch.Tensor | None, dim: int) -> torch.Tensor:
    return x if index is None else x.index_select(dim, index.to(x.device))
