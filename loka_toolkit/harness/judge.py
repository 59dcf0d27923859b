"""Judgement of a kernel in float64: is it right, and what does its recipe cost on this draw?

Every product is compared twice: with the float64 product of the operands *as the kernel saw them*
(de-quantized), which tells whether the kernel is right, and with the float64 product of the
*original* operands, which is the whole error. The second is set against the recipe's emulation on
the same draw. Output rows, columns and batches may be sub-sampled, the contraction never.

Limits. A right kernel differs from the first reference only by its accumulator and by rounding its
output. For one element with products p_k = a_k b_k that explains about (root of)

    u_out^2 / 3 (ref^2 + |p|_2^2)     output rounding; partial sums of a split contraction may be
                                      rounded to the output dtype too
    + u^2 L / 12 (ref^2 + |p|_2^2)    L truncations, each uniform within one unit of a running sum
                                      that wanders to |p|_2 or drifts to ref: 1/3 for the uniform,
                                      1/2 for the mean over the sum's course, 1/2 because the unit
                                      is that of the power of two below
    + (u L ref^2 / (5 |p|_1))^2       truncation towards zero is a bias, to the extent ref / |p|_1
                                      that products share a sign: 1/2 for its mean, 1/2 for the
                                      mean over the course, 0.7 for the power of two below
    + u_in^2 (ref^2 + |p|_2^2)        operands that the kernel itself truncates (TF32)

with u = 2^-13 and L = K for ``fast`` (Hopper keeps 13 fraction bits below the largest exponent),
L = 128 for ``promoted-128``, and u = 2^-24, L = K for float32. That exceeds the error of the
emulated accumulators 1.5 to 10 times. A kernel is wrong where the error of the whole sample, or of
any tile of 16 x 16 sampled elements, exceeds KERNEL_FACTOR times that: for ``fast`` products of
mixed signs 2.2 % at K = 4096. One lost tile of 64 among 4096 products is an error of 12 %; a
transposed, stale or unscaled tile, of 100 % and more.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from loka_toolkit.harness.poison import poisoned
from loka_toolkit.harness.trial import (
    TF32_MANTISSA_BITS,
    UNQUANTIZED,
    Emulation,
    Trial,
    narrower,
    prepare,
)
from loka_toolkit.kernels.contract import Candidate
from loka_toolkit.numerics.accumulation import ACCUMULATOR_MANTISSA_BITS, PROMOTION_INTERVAL
from loka_toolkit.numerics.metrics import product_error
from loka_toolkit.numerics.recipes import Accumulation, parse_recipe

KERNEL_FACTOR = 4.0
"""12 dB above what accumulation and output dtype explain: another order of summation changes the
error by less than two, the sampling of one tile by less than half, and the errors to be caught are
at least ten times larger."""

EXCESS_LIMIT = 1.5
"""Between 1.05, what a legitimate choice of scale (powers of two, say) does to the error of E4M3,
and 2, the step from E4M3 to E5M2: a kernel that casts to another format than its recipe says is
caught."""

TILE_EXCESS_LIMIT = 4.0
"""The same for the worst tile, which catches a coarser grain than the recipe says (small rows are
flushed beside large ones, and the whole product hardly shows it). Two independent roundings of 256
elements that share rows and columns differ by less than twice in root mean square."""

REPEATS = 3
"""Runs on the same prepared operands that must agree bit for bit: races differ rarely."""

_TILE = 16


@dataclasses.dataclass(frozen=True)
class Judgement:
    """How a candidate fared on one draw; errors are relative Frobenius errors, None if 0/0.

    Attributes:
        kernel: Against float64 on the de-quantized operands.
        total: Against float64 on the originals.
        emulation: Error of the recipe's emulation on the same draw, against the same originals.
        fault: Why the numerics are wrong, or None.
    """

    kernel: float | None
    total: float | None
    emulation: float | None
    fault: str | None


def judge(candidate: Candidate, trial: Trial, *, repeats: int = REPEATS) -> Judgement:
    """Run a candidate on one draw and judge what it returned.

    Args:
        candidate: The candidate.
        trial: The draw.
        repeats: Runs on the same prepared operands that must agree.

    Returns:
        The judgement; whatever the candidate raises passes through.
    """
    out_dtype = trial.out_dtype
    prepared = prepare(candidate, trial)
    outputs = []
    for _ in range(repeats):
        with poisoned(trial.shape, out_dtype, trial.a.device):
            outputs.append(candidate.run(*prepared, out_dtype))
    fault = _malformed(outputs[0], trial.shape, out_dtype) or _irreproducible(outputs)
    if fault is not None:
        return Judgement(None, None, None, fault)
    out = trial.sample.output(outputs[0]).to(torch.float64)
    seen_a, seen_b = trial.sample.seen(*prepared)
    explained = _explained(seen_a, seen_b, candidate.recipe, out_dtype)
    narrow = narrower(candidate.recipe, out_dtype)
    kernel = product_error(seen_a @ seen_b, out).relative_frobenius
    total = product_error(trial.reference, out).relative_frobenius
    emulation = trial.emulation(candidate.recipe)
    fault = _nonfinite_fault(outputs[0], trial.a, trial.b, narrow) or _kernel_fault(
        out, seen_a @ seen_b, explained, narrow
    )
    if fault is None and emulation is not None and total is not None:
        fault = _excess_fault(out, trial.reference, emulation, explained)
    return Judgement(kernel, total, emulation.relative_error if emulation else None, fault)


def _malformed(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    if tuple(out.shape) != tuple(shape) or out.dtype is not dtype:
        return f"returned {list(out.shape)} {out.dtype}, expected {list(shape)} {dtype}".replace(
            "torch.", ""
        )
    return None


def _irreproducible(outputs: list[torch.Tensor]) -> str | None:
    first = outputs[0]
    for index, other in enumerate(outputs[1:], start=2):
        if other.shape == first.shape and torch.equal(_bits(first), _bits(other)):
            continue
        difference = (first.to(torch.float64) - other.to(torch.float64)).abs().nan_to_num(math.inf)
        largest = float(difference.max()) if difference.numel() else 0.0
        return (
            f"run {index} on the same operands differs from run 1 in "
            f"{int((difference != 0).sum())} elements, by at most {largest:.3g}"
        )
    return None


def _bits(value: torch.Tensor) -> torch.Tensor:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return value.contiguous().view(integer)


def _nonfinite_fault(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, narrow: torch.dtype
) -> str | None:
    """Finite operands must not give Inf or NaN, nor Inf and NaN in an operand a finite output.

    The sums of magnitudes decide whether an overflow of the output dtype is legitimate; this looks
    at every output element, not at a sample.
    """
    if not out.numel():
        return None
    bad_rows = ~torch.isfinite(a).all(dim=-1, keepdim=True)
    bad_columns = ~torch.isfinite(b).all(dim=-2, keepdim=True)
    expected_bad = bad_rows | bad_columns
    finite = torch.isfinite(out)
    hidden = int((expected_bad & finite).sum())
    if hidden:
        return f"{hidden} outputs are finite although an operand holds Inf or NaN there"
    appeared = ~expected_bad & ~finite
    if not bool(appeared.any()):
        return None
    row_norms = a.to(torch.float64).norm(dim=-1, keepdim=True)
    column_norms = b.to(torch.float64).norm(dim=-2, keepdim=True)
    may_overflow = row_norms * column_norms >= torch.finfo(narrow).max
    wrong = int((appeared & ~may_overflow).sum())
    return f"{wrong} outputs are Inf or NaN where the reference is finite" if wrong else None


def _kernel_fault(
    out: torch.Tensor, reference: torch.Tensor, explained: torch.Tensor, narrow: torch.dtype
) -> str | None:
    if not reference.numel():
        return None
    known = torch.isfinite(reference) & (reference.abs() <= torch.finfo(narrow).max)
    error = torch.where(known, out - reference, 0.0).square()
    if not bool(torch.isfinite(error).all()):
        return "outputs are Inf or NaN where the reference on the de-quantized operands is finite"
    explained = torch.where(known, explained, 0.0).square()
    limit = KERNEL_FACTOR**2
    for name, found, allowed in (
        ("of the product", error.mean(), explained.mean()),
        ("of the worst tile", *_worst_tile(error, explained)),
    ):
        if not bool(found <= limit * allowed):
            return (
                f"kernel error {name} is {math.sqrt(float(found)):.3g} (root mean square); "
                f"accumulation and output dtype explain {math.sqrt(float(allowed)):.3g}, "
                f"and {KERNEL_FACTOR:g} times that is the limit"
            )
    return None


def _explained(
    a: torch.Tensor, b: torch.Tensor, recipe_name: str, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return the root-mean-square error that a right kernel may show, per element."""
    k = a.shape[-1]
    recipe = None if recipe_name in UNQUANTIZED else parse_recipe(recipe_name)
    unit, length = 2.0**-24, k
    if recipe is not None and recipe.accumulation is not Accumulation.FP32:
        unit = 2.0**-ACCUMULATOR_MANTISSA_BITS
        length = k if recipe.accumulation is Accumulation.FAST else min(k, PROMOTION_INTERVAL)
    reference = (a @ b).nan_to_num(0.0, 0.0, 0.0)
    magnitude = (a.abs() @ b.abs()).nan_to_num(0.0, 0.0, 0.0)
    root_square = (a.square() @ b.square()).sqrt().nan_to_num(0.0, 0.0, 0.0)
    info = torch.finfo(narrower(recipe_name, out_dtype))
    drift = torch.where(magnitude > 0, reference.square() / magnitude, 0.0)
    size = reference.square() + root_square.square()
    square = (info.eps / 2) ** 2 / 3 * size
    square += unit**2 * length / 12 * size
    square += (unit * length / 5 * drift).square()
    if recipe_name == "tf32":
        square += (2.0**-TF32_MANTISSA_BITS) ** 2 * size
    return square.sqrt() + info.smallest_normal * info.eps


def _worst_tile(error: torch.Tensor, explained: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean squared error and explanation of the tile in which their ratio is largest."""
    tiles = []
    for value in (error, explained):
        flat = value.reshape(-1, *value.shape[-2:])
        tiles.append(
            torch.nn.functional.avg_pool2d(
                flat, _TILE, ceil_mode=True, count_include_pad=False
            ).flatten()
        )
    worst = int((tiles[0] / tiles[1].clamp(min=torch.finfo(torch.float64).tiny)).argmax())
    return tiles[0][worst], tiles[1][worst]


def _excess_fault(
    out: torch.Tensor, reference: torch.Tensor, emulation: Emulation, explained: torch.Tensor
) -> str | None:
    """The total error may exceed the emulation's by a factor, and by what any kernel may show."""
    error = (out - reference).square()
    kernel = (KERNEL_FACTOR * explained).square()
    whole = EXCESS_LIMIT**2 * emulation.square_error + kernel
    tile = TILE_EXCESS_LIMIT**2 * emulation.square_error + kernel
    for name, factor, found, allowed in (
        ("of the product", EXCESS_LIMIT, error.mean(), whole.mean()),
        ("of the worst tile", TILE_EXCESS_LIMIT, *_worst_tile(error, tile)),
    ):
        if not bool(found <= allowed):
            return (
                f"total error {name} is {math.sqrt(float(found)):.3g} (root mean square), above "
                f"{factor:g} times that of the recipe's emulation on the same draw and what "
                f"accumulation and output dtype explain, together {math.sqrt(float(allowed)):.3g}"
            )
    return None
