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

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.recording.sampling import SampledRows


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
        index: Any = (slice(None), slice(None), channel, *every, *offsets)
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
            index: Any = (slice(None), slice(None), *at)
            element: Any = (..., *offsets)
            whole[index] += parts[element]
        inside = (slice(p, p + n) for p, n in zip(self.padding, self.wide_size, strict=True))
        cropped: Any = (slice(None), slice(None), *inside)
        return whole[cropped]

    def largest(self, t: torch.Tensor) -> tuple[int, int]:
        """Return a patch and a column that hold the largest element of all patches."""
        magnitude = torch.nan_to_num(t.detach().abs().float(), nan=0.0, posinf=0.0)
        places = []
        for axis, size in enumerate(self.wide_size):
            reached = self._reached(axis)
            places.append(reached)
            kept = torch.tensor([i in reached for i in range(size)], device=t.device)
            shape = [1] * t.ndim
            shape[2 + axis] = size
            magnitude = magnitude * kept.reshape(shape)
        at = [int(i) for i in torch.unravel_index(magnitude.argmax(), t.shape)]
        found = [reached.get(i, (0, 0)) for reached, i in zip(places, at[2:], strict=True)]
        channel = at[1] % (self.wide_channels // self.groups)
        positions, offsets = zip(*found, strict=True)
        return (
            _ravelled((at[0], *positions), (self.examples, *self.positions)),
            _ravelled((channel, *offsets), (1, *self.kernel)),
        )

    def _reached(self, axis: int) -> dict[int, tuple[int, int]]:
        """Return patch and offset by every coordinate that a patch reaches: strides skip some."""
        start, stride, dilation = self.padding[axis], self.stride[axis], self.dilation[axis]
        pairs = itertools.product(range(self.positions[axis]), range(self.kernel[axis]))
        return {p * stride + k * dilation - start: (p, k) for p, k in pairs}

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
