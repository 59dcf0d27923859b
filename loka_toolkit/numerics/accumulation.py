"""Accumulators: how the partial products of an FP8 GEMM are summed.

``fast`` is a model of the FP8 tensor core of NVIDIA Hopper (and Ada). Its sources:

- DeepSeek-V3 technical report (arXiv 2412.19437), section 3.5.2: 32 products are aligned by
  right-shifting to the largest exponent among them, only their highest 14 bits take part in the
  addition, the rest is truncated; the accumulating register has 14 bits too.
- SageAttention2 (arXiv 2411.10958): by probing the instruction, the accumulator has 1 sign, 8
  exponent and 13 mantissa bits ("FP22"); a longer addend loses its lowest 10 bits by truncation.
- MMA-Sim (arXiv 2511.10909) and "Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004): the
  same structure, validated bit by bit against hardware.

The model: per step of 32 products, products and accumulator are aligned to the largest exponent
among them, truncated toward zero 13 bits below it, summed exactly, and the sum is truncated to 13
mantissa bits. Its limits: a product's exponent is taken as the sum of the exponents of normalized
factors (hardware does not normalize subnormal FP8 values, which may keep fewer bits of them); the
order of the 32-blocks is that of k, where a kernel may split K over blocks; other chips differ.
Checked on an H200 (``benchmarks/accumulator_probe.py``): relative errors equal to four digits for K
up to 16384 and operands of one sign or both, 68 to 97 % of the outputs bit-equal; where the library
splits K (128 x 128 outputs, K = 16384) it errs five times less than the model says.
"""

from __future__ import annotations

import torch

from loka_toolkit.errors import ConfigurationError
from loka_toolkit.numerics.casting import power_of_two
from loka_toolkit.numerics.recipes import Accumulation

PRODUCTS_PER_STEP = 32
ACCUMULATOR_MANTISSA_BITS = 13
PROMOTION_INTERVAL = 128

_FLOAT32_MANTISSA_BITS = 23
_TRUNCATION_MASK = -(1 << (_FLOAT32_MANTISSA_BITS - ACCUMULATOR_MANTISSA_BITS))
_SMALLEST_ALIGNMENT = 2.0**-100  # below any FP8 product; keeps 1 / alignment finite for zeros
_BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}  # products held at once: 1 MiB in L2; 256 MiB


def accumulate(a: torch.Tensor, b: torch.Tensor, accumulation: Accumulation) -> torch.Tensor:
    """Return the product of FP8 values under an accumulator, float32, [.., M, N].

    ``fp32`` sums in float64 and rounds once: a float32 sum in any order lies within K * 2**-24 of
    it, far below every FP8 error. An output element has the same value whichever other rows and
    columns are computed with it: by construction for the two models and, because float64 holds
    every sum of up to 2**17 products exactly, for fp32 with E4M3; with E5M2, unless the order of a
    float64 sum tips the rounding to float32, once in some 10**8 elements.

    Args:
        a: [.., M, K], values of an FP8 format (unscaled), any floating dtype.
        b: [.., K, N], likewise, same leading dimensions.
        accumulation: The accumulator.

    Raises:
        ConfigurationError: If the shapes do not multiply.
    """
    if a.ndim < 2 or a.ndim != b.ndim or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise ConfigurationError(
            f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)}: give [.., M, K] and [.., K, N] "
            "with equal leading dimensions"
        )
    exact = a.detach().to(torch.float64) @ b.detach().to(torch.float64)
    if accumulation is Accumulation.FP32 or exact.numel() == 0 or a.shape[-1] == 0:
        return exact.to(torch.float32)
    left = a.detach().to(torch.float32).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    right = b.detach().to(torch.float32).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    steps = PROMOTION_INTERVAL // PRODUCTS_PER_STEP
    promote_every = None if accumulation is Accumulation.FAST else steps
    product = _tensor_core_product(
        left.reshape(-1, *a.shape[-2:]), right.reshape(-1, *b.shape[-2:]), promote_every
    ).reshape(exact.shape)
    return torch.where(torch.isfinite(exact), product, exact.to(torch.float32))


def _tensor_core_product(
    a: torch.Tensor, b: torch.Tensor, promote_every: int | None
) -> torch.Tensor:
    """Multiply a[G,M,K] by b[G,K,N] in blocks of outputs whose products fit a cache."""
    padding = -a.shape[-1] % PRODUCTS_PER_STEP
    # k comes first, so that what is reduced over k runs along contiguous outputs.
    a = torch.nn.functional.pad(a, (0, padding)).permute(2, 0, 1).unsqueeze(-1).contiguous()
    b = torch.nn.functional.pad(b, (0, 0, 0, padding)).permute(1, 0, 2).unsqueeze(-2).contiguous()
    _, groups, m, _ = a.shape
    n = b.shape[-1]
    outputs = max(1, _BLOCK_ELEMENTS.get(a.device.type, 1 << 18) // PRODUCTS_PER_STEP)
    rows = max(1, min(m, outputs // n))
    group_step = max(1, outputs // (m * n)) if rows == m else 1
    out = torch.empty(groups, m, n, dtype=torch.float32, device=a.device)
    for g in range(0, groups, group_step):
        right = b[:, g : g + group_step]
        for i in range(0, m, rows):
            left = a[:, g : g + group_step, i : i + rows]
            out[g : g + group_step, i : i + rows] = _block_product(left, right, promote_every)
    return out


def _block_product(a: torch.Tensor, b: torch.Tensor, promote_every: int | None) -> torch.Tensor:
    """Multiply a[K,G,M,1] by b[K,G,1,N]; K is a multiple of 32."""
    a_power, b_power = power_of_two(a), power_of_two(b)
    shape = (a.shape[1], a.shape[2], b.shape[3])
    register = torch.zeros(shape, dtype=torch.float32, device=a.device)
    promoted = torch.zeros_like(register)
    terms = torch.empty(PRODUCTS_PER_STEP, *shape, dtype=torch.float32, device=a.device)
    for step, k in enumerate(range(0, a.shape[0], PRODUCTS_PER_STEP)):
        span = slice(k, k + PRODUCTS_PER_STEP)
        torch.mul(a_power[span], b_power[span], out=terms)
        alignment = torch.maximum(terms.amax(0), power_of_two(register))
        quantum = alignment.clamp_(min=_SMALLEST_ALIGNMENT) * 2.0**-ACCUMULATOR_MANTISSA_BITS
        per_quantum = quantum.reciprocal()  # exact: a power of two
        torch.mul(a[span], b[span], out=terms)
        total = terms.mul_(per_quantum).trunc_().sum(0)  # integers below 2**24: exact in any order
        total += (register * per_quantum).trunc_()
        register = _truncated(total * quantum)
        if promote_every is not None and (step + 1) % promote_every == 0:
            promoted += register
            register.zero_()
    return register if promote_every is None else promoted + register


def _truncated(x: torch.Tensor) -> torch.Tensor:
    """Drop the mantissa bits that the accumulator does not have, toward zero."""
    return (x.view(torch.int32) & _TRUNCATION_MASK).view(torch.float32)
