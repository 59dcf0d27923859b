"""Judgement of a kernel in float64: is it right, and what does its recipe cost on this draw?

Every product is compared twice: with the float64 product of the operands *as the kernel saw them*
(de-quantized), which tells whether the kernel is right, and with the float64 product of the
*original* operands, which is the whole error. The second is set against the recipe's emulation on
the same draw. Output rows, columns and batches may be sub-sampled, the contraction never.

Limits. A right kernel differs from the first reference only by its accumulator and by rounding its
output, and for one element with products p_k = a_k b_k that explains about (root of)

    (u_out (|ref| + |p|_2))^2               output rounding; partial sums of a split contraction may
                                            be rounded to the output dtype too
    + u^2 (L / 3) (|p|_2^2 + ref^2)         L roundings, each uniform within one unit u of a running
                                            sum that wanders as far as |p|_2 or drifts to ref
    + (u L ref^2 / (2 |p|_1))^2             truncation towards zero is a bias of u/2 per product,
                                            to the extent that the products share a sign
    + u_in^2 |p|_2^2                        operands that the kernel itself rounds (TF32)

with u = 2^-13 and L = K for ``fast`` (Hopper keeps 13 fraction bits below the largest exponent),
L = 128 for ``promoted-128``, and u = 2^-24, L = K for float32. These are root-mean-square figures
with room for the order of summation; a kernel is wrong where the error of the whole sample, or of
any tile of 16 x 16 sampled elements, exceeds KERNEL_FACTOR times that. One lost K tile of 64 in
4096 products is an error of 12 %; a transposed, stale or unscaled tile, of 100 % and more.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from loka_toolkit.harness.sampling import OutputSample, poison
from loka_toolkit.kernels.contract import Candidate, Prepared, Side
from loka_toolkit.numerics.accumulation import ACCUMULATOR_MANTISSA_BITS, PROMOTION_INTERVAL
from loka_toolkit.numerics.emulation import emulate
from loka_toolkit.numerics.metrics import product_error
from loka_toolkit.numerics.recipes import (
    BASELINE_RECIPES,
    Accumulation,
    Recipe,
    Scaling,
    parse_recipe,
)
from loka_toolkit.numerics.scaling import STATIC_HEADROOM, decode_scale, finite_amax, operand_scale

KERNEL_FACTOR = 4.0
"""12 dB above what accumulation and output dtype explain: another order of summation changes the
error by less than two, the sampling of one tile by less than half, and the errors to be caught are
at least ten times larger."""

EXCESS_LIMIT = 1.5
"""Between 1.05, what a legitimate choice of scale (powers of two, say) does to the error of E4M3,
and 2, the step from E4M3 to E5M2: a kernel that casts to another format or grain than its recipe
says is caught."""

REPEATS = 3
"""Runs on the same prepared operands that must agree bit for bit: races differ rarely."""

UNQUANTIZED = ("fp64", *BASELINE_RECIPES)
"""Recipes without FP8: there is nothing to emulate but the rounding of operands and output."""

_ROUNDED_TO = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_TILE = 16
_MANTISSA_TF32 = 10


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


def recipe_of(candidate: Candidate) -> Recipe | None:
    """Return the candidate's FP8 recipe, or None if its recipe is a baseline such as ``bf16``.

    Raises:
        UnknownNameError: If its recipe is neither.
    """
    return None if candidate.recipe in UNQUANTIZED else parse_recipe(candidate.recipe)


class Trial:
    """One draw and what is known about its product, shared by all candidates that are judged on it.

    Args:
        a: [.., M, K], as the training job would multiply it.
        b: [.., K, N].
        out_dtype: Dtype of the output.
        amax: Largest magnitudes recorded of A and B, for static scales.
    """

    def __init__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out_dtype: torch.dtype,
        amax: tuple[float | None, float | None] = (None, None),
    ) -> None:
        self.a = a
        self.b = b
        self.out_dtype = out_dtype
        self.sample = OutputSample.of(a, b)
        self._amax = amax
        self._emulation_errors: dict[str, float | None] = {}
        part_a, part_b = self.sample.rows(a), self.sample.columns(b)
        self.reference = part_a.to(torch.float64) @ part_b.to(torch.float64)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the product."""
        return (*self.a.shape[:-1], self.b.shape[-1])

    def static_scales(self, recipe: Recipe | None) -> tuple[torch.Tensor | None, ...]:
        """Return the scales of A and B known beforehand, scalars; None unless scaling is static.

        The draw's own amax counts beside the recorded one: saturation under a stale scale is a
        property of the training run and judged there, not one of the kernel.
        """
        if recipe is None or recipe.scaling is not Scaling.STATIC:
            return None, None
        return tuple(
            decode_scale(
                torch.clamp(finite_amax(x), min=recorded or 0.0), fmt, headroom=STATIC_HEADROOM
            )
            for x, recorded, fmt in zip((self.a, self.b), self._amax, recipe.formats, strict=True)
        )

    def emulation_error(self, recipe_name: str) -> float | None:
        """Return the relative error of a recipe's emulation against the originals.

        None if 0/0, and for recipes that leave operands as they are: nothing is to be emulated.
        """
        if recipe_name in ("fp64", "fp32"):
            return None
        if recipe_name not in self._emulation_errors:
            value = self._emulate(recipe_name).to(_narrower(recipe_name, self.out_dtype))
            self._emulation_errors[recipe_name] = product_error(
                self.reference, value
            ).relative_frobenius
        return self._emulation_errors[recipe_name]

    def _emulate(self, recipe_name: str) -> torch.Tensor:
        """Return the recipe's product on the sample, scales taken from the full operands.

        A baseline's is the float64 product of operands rounded to its format.
        """
        part_a, part_b = self.sample.rows(self.a), self.sample.columns(self.b)
        if recipe_name in UNQUANTIZED:
            return _rounded(part_a, recipe_name) @ _rounded(part_b, recipe_name)
        recipe = parse_recipe(recipe_name)
        static_a, static_b = self.static_scales(recipe)
        format_a, format_b = recipe.formats
        scale_a = operand_scale(self.a, format_a, recipe.scaling, "a", static_a)
        scale_b = operand_scale(self.b, format_b, recipe.scaling, "b", static_b)
        return emulate(
            part_a,
            part_b,
            recipe,
            scale_a=self.sample.rows(scale_a) if scale_a.ndim else scale_a,
            scale_b=self.sample.columns(scale_b) if scale_b.ndim else scale_b,
        )


def prepare(candidate: Candidate, trial: Trial) -> tuple[Prepared, Prepared]:
    """Let a candidate cast both factors of a draw."""
    scale_a, scale_b = trial.static_scales(recipe_of(candidate))
    return (
        candidate.prepare(trial.a, Side.A, scale_a),
        candidate.prepare(trial.b, Side.B, scale_b),
    )


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
        poison(trial.shape, out_dtype, trial.a.device)
        outputs.append(candidate.run(*prepared, out_dtype))
    fault = _malformed(outputs[0], trial.shape, out_dtype) or _irreproducible(outputs)
    if fault is not None:
        return Judgement(None, None, None, fault)
    out = trial.sample.output(outputs[0]).to(torch.float64)
    seen_a, seen_b = trial.sample.seen(*prepared)
    explained = _explained(seen_a, seen_b, candidate.recipe, out_dtype)
    narrow = _narrower(candidate.recipe, out_dtype)
    kernel = product_error(seen_a @ seen_b, out).relative_frobenius
    total = product_error(trial.reference, out).relative_frobenius
    emulation = trial.emulation_error(candidate.recipe)
    fault = (
        _nonfinite_fault(outputs[0], trial.a, trial.b, narrow)
        or _kernel_fault(out, seen_a @ seen_b, explained, narrow)
        or _excess_fault(total, emulation, trial.reference, explained)
    )
    return Judgement(kernel, total, emulation, fault)


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
    info = torch.finfo(_narrower(recipe_name, out_dtype))
    drift = torch.where(magnitude > 0, reference.square() / magnitude, 0.0)
    square = (info.eps / 2 * (reference.abs() + root_square)).square()
    square += unit**2 * (length / 3) * (root_square.square() + reference.square())
    square += (unit * length / 2 * drift).square()
    if recipe_name == "tf32":
        square += (2.0 ** -(_MANTISSA_TF32 + 1) * root_square).square() * 2
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
    total: float | None,
    emulation: float | None,
    reference: torch.Tensor,
    explained: torch.Tensor,
) -> str | None:
    """The total error may exceed the emulation's by a factor, and by what any kernel may show."""
    if total is None or emulation is None:
        return None
    size = _root_mean_square(reference)
    kernel = KERNEL_FACTOR * _root_mean_square(explained) / size if size > 0 else 0.0
    if total <= EXCESS_LIMIT * emulation + kernel:
        return None
    return (
        f"total error {total:.3g} exceeds {EXCESS_LIMIT:g} times that of the recipe's emulation on "
        f"the same draw ({emulation:.3g}) and what accumulation and output dtype explain"
    )


def _rounded(value: torch.Tensor, baseline: str) -> torch.Tensor:
    if baseline == "tf32":
        bits = value.to(torch.float32).contiguous().view(torch.int32)
        dropped = 23 - _MANTISSA_TF32
        kept = (bits + (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)) & -(1 << dropped)
        return kept.view(torch.float32).to(torch.float64)
    return value.to(_ROUNDED_TO[baseline]).to(torch.float64)


def _narrower(recipe_name: str, out_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that limits the output: a bf16 product is bf16 before it is widened."""
    own = _ROUNDED_TO.get(recipe_name, out_dtype)
    return own if torch.finfo(own).eps > torch.finfo(out_dtype).eps else out_dtype


def _root_mean_square(value: torch.Tensor) -> float:
    finite = value[torch.isfinite(value)].to(torch.float64)
    return math.sqrt(float(finite.square().mean())) if finite.numel() else 0.0
