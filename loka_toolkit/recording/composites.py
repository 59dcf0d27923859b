"""Operators that hold several products: fused attention and RNNs, bilinear and grouped products.

They become sites without errors: what goes on inside cannot be emulated from the outside, and no
kernel for one product can stand in for them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.recording.products import SiteShape, dtype_name, layout_of

aten = torch.ops.aten

ATTENTION = "fused attention: its products are computed inside of one operator"
RNN = "fused RNN: its products are computed inside of one operator"
BILINEAR = "a form of three operands is not one product"
GROUPED = "groups of ragged sizes are not one product"
SUMMED = "a sum over a batch of products is not one product"


@dataclasses.dataclass(frozen=True)
class Composite:
    """One call of an operator that holds several products.

    Attributes:
        shape: What the table ``sites`` says of it.
        role: What it does; None where that depends on the forward that it belongs to.
        reason: Why it is neither judged nor replaced.
        factors: Its operands.
    """

    shape: SiteShape
    role: Role | None
    reason: str
    factors: tuple[torch.Tensor, ...]

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return self.shape.flops

    def role_after(
        self, forward: tuple[int, ...], backward: tuple[int, ...], has_parameter: bool
    ) -> Role:
        """Return the role of a backward call.

        Args:
            forward: Identities of the memory of the forward's operands.
            backward: Those of this call's.
            has_parameter: Whether an operand of the forward is a parameter.
        """
        if self.role is not None:
            return self.role
        if self.reason == BILINEAR:
            # The output's gradient stands where the operand stood whose gradient is computed.
            fresh = [i for i, name in enumerate(backward) if name not in forward]
            index = fresh[0] if fresh else 0
            return (Role.GRAD_A, Role.WGRAD if has_parameter else Role.BWD, Role.GRAD_B)[index]
        of_right = forward[0] in backward
        if has_parameter:
            return Role.WGRAD if of_right else Role.DGRAD
        return Role.GRAD_B if of_right else Role.GRAD_A


def is_composite(func: torch._ops.OpOverload) -> bool:
    """Whether an operator holds several products."""
    return func._schema.name in _COMPOSITES


def composite_of(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Composite | None:
    """Return what a call of a composite did; None if it is none."""
    read = _COMPOSITES.get(func._schema.name)
    return None if read is None else read(str(func), args, kwargs, out)


def _shape(
    op: str,
    dims: tuple[int, int, int, int],
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    flops: float,
    reason: str,
) -> SiteShape:
    batch, m, n, k = dims
    return SiteShape(
        op=op,
        batch=batch,
        m=m,
        n=n,
        k=k,
        dtype_a=dtype_name(a.dtype),
        dtype_b=dtype_name(b.dtype),
        dtype_out=dtype_name(out.dtype),
        layout_a=_layout(a),
        layout_b=_layout(b),
        flops=flops,
        bar=reason,
    )


def _layout(x: torch.Tensor) -> str:
    return layout_of(x) if x.ndim > 1 else "row"


def _first(out: Any) -> torch.Tensor:
    found = out[0] if isinstance(out, tuple | list) else out
    assert isinstance(found, torch.Tensor)
    return found


_PACKED = {
    "aten._flash_attention_forward.default": (3, 6),
    "aten._flash_attention_backward.default": (6, 9),
    "aten._efficient_attention_forward.default": (4, 7),
    "aten._efficient_attention_backward.default": (6, 9),
    "aten._cudnn_attention_forward.default": (4, 7),
    "aten._cudnn_attention_backward.default": (9, 12),
}
"""Where the arguments hold the offsets of packed sequences, and the longest sequence of keys."""


def _attention(
    is_backward: bool, heads_axis: int = -3, length_axis: int = -2
) -> Callable[[str, tuple[Any, ...], dict[str, Any], Any], Composite]:
    """Return a reader of attention over [.., heads, length, width], or with other axes.

    FLOPs take no account of a causal mask, as in torch.utils.flop_counter. Forward multiplies
    twice; backward computes the scores anew and four gradients. Of sequences packed into one, each
    query is taken to meet as many keys as the longest sequence has.
    """

    def read(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Composite:
        q, k, v = args[1:4] if is_backward else args[:3]
        batch = math.prod(q.shape[:-3]) * q.shape[heads_axis]
        rows, columns = q.shape[length_axis], k.shape[length_axis]
        offsets, longest = _PACKED.get(op, (len(args), len(args)))
        if longest < len(args) and args[offsets] is not None:
            batch, rows = q.shape[-2], q.shape[-3]
            columns = int(args[longest]) if args[longest] is not None else k.shape[-3]
        width, value = q.shape[-1], v.shape[-1]
        each = 2.0 * batch * rows * columns
        flops = each * (3 * width + 2 * value) if is_backward else each * (width + value)
        role = Role.BWD if is_backward else Role.FWD
        dims = (batch, rows, columns, width)
        shape = _shape(op, dims, q, k, _first(out), flops, ATTENTION)
        return Composite(shape, role, ATTENTION, (q, k, v))

    return read


def _rnn(
    is_backward: bool, weights_of: Callable[[tuple[Any, ...]], Sequence[torch.Tensor]]
) -> Callable[[str, tuple[Any, ...], dict[str, Any], Any], Composite]:
    """Return a reader of a fused RNN: every token meets every weight matrix once.

    Backward multiplies twice as much: gradients of inputs and of weights.
    """

    def read(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Composite:
        x = args[0]
        matrices = [w for w in weights_of(args) if w.ndim == 2]
        tokens = x.numel() // x.shape[-1] if x.shape[-1] else 0
        flops = 2.0 * tokens * sum(w.numel() for w in matrices) * (2 if is_backward else 1)
        columns, rows = matrices[0].shape[0], matrices[0].shape[1] + matrices[1].shape[1]
        role = Role.BWD if is_backward else Role.FWD
        dims = (1, tokens, columns, rows)
        shape = _shape(op, dims, x, matrices[0], _first(out), flops, RNN)
        return Composite(shape, role, RNN, (x, *matrices))

    return read


def _bilinear(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Composite:
    """Read a sum over products of three operands as that of two of them times the third."""
    operands = tuple(args[:3])
    summed = args[6]
    whole = []
    for x, axes in zip(operands, args[3:6], strict=True):
        for axis in sorted(axes):
            x = x.unsqueeze(axis)
        whole.append(x.shape)
    sizes = [max(along) for along in zip(*whole, strict=True)]
    sizes = [
        0 if 0 in along else size
        for size, along in zip(sizes, zip(*whole, strict=True), strict=True)
    ]
    terms = math.prod(sizes)
    contracted = math.prod(sizes[axis] for axis in summed)
    rows = next((size for axis, size in enumerate(sizes) if axis not in summed), 1)
    columns = terms // (rows * contracted) if terms else 0
    dims = (1, rows, columns, contracted)
    shape = _shape(op, dims, operands[0], operands[1], out, 2.0 * terms, BILINEAR)
    return Composite(shape, None, BILINEAR, operands)


def _grouped(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Composite:
    """Read products of groups of rows, or over groups of the contraction."""
    a, b = args[:2]
    batch = a.shape[0] if a.ndim == b.ndim == 3 else 1
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    flops = 2.0 * batch * m * n * k
    shape = _shape(op, (batch, m, n, k), a, b, out, flops, GROUPED)
    return Composite(shape, None, GROUPED, (a, b))


def _summed(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Composite:
    """Read a sum over a batch of products as one product that contracts over the batch too."""
    a, b = args[1:3]
    batch, m, k = a.shape
    n = b.shape[-1]
    flops = 2.0 * batch * m * n * k
    shape = _shape(op, (1, m, n, batch * k), a, b, out, flops, SUMMED)
    return Composite(shape, None, SUMMED, (a, b))


_Reader = Callable[[str, tuple[Any, ...], dict[str, Any], Any], Composite]

_FUSED = (
    "flash_attention_for_cpu",
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
)

_COMPOSITES: dict[str, _Reader] = {
    **{f"aten::_scaled_dot_product_{name}": _attention(False) for name in _FUSED},
    **{f"aten::_scaled_dot_product_{name}_backward": _attention(True) for name in _FUSED},
    "aten::_flash_attention_forward": _attention(False, -2, -3),
    "aten::_flash_attention_backward": _attention(True, -2, -3),
    "aten::_efficient_attention_forward": _attention(False, -2, -3),
    "aten::_efficient_attention_backward": _attention(True, -2, -3),
    "aten::_cudnn_attention_forward": _attention(False),
    "aten::_cudnn_attention_backward": _attention(True),
    "aten::mkldnn_rnn_layer": _rnn(False, lambda args: args[1:3]),
    "aten::mkldnn_rnn_layer_backward": _rnn(True, lambda args: args[1:3]),
    "aten::_cudnn_rnn": _rnn(False, lambda args: args[1]),
    "aten::_cudnn_rnn_backward": _rnn(True, lambda args: args[1]),
    "aten::miopen_rnn": _rnn(False, lambda args: args[1]),
    "aten::miopen_rnn_backward": _rnn(True, lambda args: args[1]),
    "aten::_trilinear": _bilinear,
    "aten::_grouped_mm": _grouped,
    "aten::addbmm": _summed,
    "aten::addbmm_": _summed,
}
"""By name, since not every version of PyTorch has all of them."""
