"""Which aten operators mean what to the recorder, products that become sites apart."""

from __future__ import annotations

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

OTHER_PRODUCTS: frozenset[str] = frozenset(
    {
        "aten::_native_multi_head_attention",
        "aten::_transformer_encoder_layer_fwd",
        "aten::_convolution",
        "aten::cudnn_convolution",
        "aten::cudnn_convolution_transpose",
        "aten::convolution_overrideable",
        "aten::mkldnn_convolution",
        "aten::conv_tbc",
        "aten::quantized_lstm",
        "aten::_weight_int4pack_mm",
        "aten::_weight_int8pack_mm",
    }
)
"""Work that is no site, beside what PyTorch counts FLOPs of: none of it is used in training."""


def is_unseen_work(func: torch._ops.OpOverload) -> bool:
    """Whether an operator that is no site multiplies matrices."""
    return func._schema.name in OTHER_PRODUCTS or func.overloadpacket in flop_registry


def unseen_flops(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Return the FLOPs of an operator that is work and no site; 0 where they cannot be told."""
    known = flop_registry.get(packet)
    try:
        return 0.0 if known is None else float(known(*args, **kwargs, out_val=out))
    except (TypeError, ValueError, AttributeError, AssertionError):
        return 0.0
