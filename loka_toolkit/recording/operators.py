"""Which aten operators mean what to the recorder, products that become sites apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

COPIES = frozenset({aten._to_copy, aten.clone})
NORMS = frozenset(
    {
        aten.native_layer_norm,
        aten.native_batch_norm,
        aten._native_batch_norm_legit,
        aten._batch_norm_with_update,
        aten.cudnn_batch_norm,
        aten.miopen_batch_norm,
        aten.native_group_norm,
        aten._fused_rms_norm,
    }
)
ACTIVATIONS = frozenset(
    {
        aten.relu,
        aten.relu_,
        aten.gelu,
        aten.silu,
        aten.sigmoid,
        aten.tanh,
        aten.leaky_relu,
        aten.elu,
        aten.hardswish,
        aten.hardtanh,
        aten.add,
        aten.mul,
        aten.native_dropout,
        aten.clone,
        aten._to_copy,
    }
)
"""Operators that may stand between a product and the norm that it feeds."""

OTHER_PRODUCTS: dict[Any, Callable[..., float]] = {
    aten.mv: lambda a, b, *_: 2.0 * a.numel(),
    aten.addmv: lambda _, a, *__: 2.0 * a.numel(),
    aten.dot: lambda a, *_: 2.0 * a.numel(),
    aten.addbmm: lambda _, a, b, *__: 2.0 * a.numel() * b.shape[-1],
    aten._trilinear: lambda a, b, c, *_: 0.0,
    aten.mkldnn_rnn_layer: lambda *_: 0.0,
    aten.mkldnn_rnn_layer_backward: lambda *_: 0.0,
    aten._cudnn_rnn: lambda *_: 0.0,
    aten._cudnn_rnn_backward: lambda *_: 0.0,
    # Two products forward, five backward.
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_: (
        4.0 * q.numel() * k.shape[-2]
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, *_: (
        10.0 * q.numel() * k.shape[-2]
    ),
    aten._grouped_mm: lambda a, b, *_: 2.0 * a.numel() * b.shape[-1],
}
"""Work that is no site yet; FLOPs where they are cheap to tell, else 0: the reason still counts."""

INSTALLED_TABLE = "run by an installed dispatch table: record inside installation.paused()"
"""Why a product that the toolkit's own operators compute is no site: its operands are not those of
the original precision, and what an operator does inside is hidden from the recorder."""

_INSTALLED_PRODUCTS: dict[str, Callable[..., float]] = {
    "loka::gemm": lambda a, b, *_, **__: 2.0 * a.numel() * b.shape[-1],
    "loka::missed_mm": lambda a, b, *_, **__: 2.0 * a.numel() * b.shape[-1],
    "loka::missed_linear": lambda x, weight, *_, **__: 2.0 * x.numel() * weight.shape[0],
}
"""Operators of an installed dispatch table by name, since they exist only once it is imported."""


def installed_flops(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """Return the FLOPs of a product that an installed dispatch table ran; None for other work."""
    known = _INSTALLED_PRODUCTS.get(func._schema.name)
    return None if known is None else known(*args, **kwargs)


def unseen_flops(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Return the FLOPs of an operator that is work and no site; 0 where they cannot be told."""
    known = OTHER_PRODUCTS.get(packet)
    try:
        if known is not None:
            return float(known(*args))
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    except (TypeError, ValueError, AttributeError, AssertionError):
        return 0.0
