"""How long a GEMM and its casts should take on a chip that need not be present.

An operation is launched, then computes and moves bytes; the two overlap imperfectly, so they add in
quadrature:

    time = launch + sqrt(compute**2 + memory**2)

Measured on one H200 (CUDA graphs, torch's scaled_mm and cuBLAS): a large BF16 GEMM sustains 80 % of
peak (790 TFLOP/s at 8192**3) and a large copy reaches 4.3 TB/s. Five more constants were calibrated
on timings of eight shapes: a GEMM costs 3.5 us and a cast 2 us beyond its work, large FP8 GEMMs
sustain 75 % of peak, bytes move at 8 TB/s while all of them fit the L2, and a rowwise cast costs
0.25 ns per row. On those shapes the median and the largest error are 1 and 11 % (BF16 GEMM), 6 and
26 % (FP8 GEMM), 5 and 13 % (static cast), 8 and 25 % (rowwise cast); of the gain over BF16, 6 and
21 % without casts, 3 and 12 % with a static cast of x, 5 and 31 % with a rowwise one. The largest
are overestimates of FP8 at 16384 x 1024 x 512. Other chips take the same constants with their own
rates and bandwidths (:mod:`loka_toolkit.numerics.chips`): an extrapolation and not a measurement.

Assumed and not measured: blockwise products take the time of promoted ones and their casts that of
rowwise casts; a hybrid computes at the rate of its 16-bit format and moves one byte per element of
its FP8 factor.

Not modelled: tile and wave quantization, split K, short rows in a rowwise cast beyond a cost per
row, and whatever a library does wrong. It ranks sites before a GPU is at hand; it replaces no
timing.
"""

from __future__ import annotations

import math

import msgspec

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.errors import ConfigurationError, UnknownNameError
from loka_toolkit.numerics.chips import CHIPS, ChipData
from loka_toolkit.numerics.formats import (
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    FNUZ_FORMATS,
    FORMATS,
)
from loka_toolkit.numerics.recipes import (
    BASELINE_RECIPES,
    Accumulation,
    Recipe,
    Scaling,
    all_recipes,
    parse_recipe,
)

FP8_ALIGNMENT = 16
"""N and K of an FP8 product are padded to multiples of this; K of block scales to whole blocks."""

PROMOTION_SLOWDOWN = 1.15
"""Time of a GEMM whose accumulator is promoted, over one with fast accumulation, where compute
bounds it: users of torchao report 1.1 to 1.2 (pytorch/ao issue 2377)."""


def gemm_time_us(
    batch: int, m: int, n: int, k: int, recipe: Recipe | str, chip: ChipData, *, out_bytes: int = 2
) -> float:
    """Return the time of out[M,N] = A[M,K] B[K,N], casts excluded, in microseconds.

    Args:
        batch: Number of products, launched together.
        m: Rows of the output.
        n: Columns of the output.
        k: Contraction length.
        recipe: An FP8 recipe or a baseline, as a value or by name.
        chip: Where.
        out_bytes: Bytes per element of the output.

    Raises:
        UnknownNameError: If there is no such recipe.
        ConfigurationError: If a dimension is negative, or the chip does not compute the recipe.
    """
    _check_dimensions(batch, m, n, k)
    if batch * m * n == 0:
        return 0.0
    parsed = parse_recipe(str(recipe))
    why = unsupported(parsed, chip)
    if why is not None:
        raise ConfigurationError(f"{parsed} has no time on {chip.name}: {why}")
    kind, slowdown = _arithmetic(parsed)
    if kind == "fp8":
        n, k = _aligned(n), _aligned(k, parsed.block_length or FP8_ALIGNMENT)
    rate = chip.peak_tflops[kind] * chip.sustained_share[kind] * 1e6  # FLOP per microsecond
    compute = 2.0 * batch * m * n * k / rate * slowdown
    bytes_a, bytes_b = (fmt.torch_dtype.itemsize for fmt in parsed.formats)
    moved = batch * (m * k * bytes_a + k * n * bytes_b + m * n * out_bytes)
    return chip.gemm_launch_us + math.hypot(compute, _memory_us(moved, chip))


def cast_time_us(
    rows: int,
    columns: int,
    scaling: Scaling,
    chip: ChipData,
    *,
    source_bytes: int = 2,
    copies: int = 1,
) -> float:
    """Return the time of a stand-alone cast, in microseconds.

    Static: read and write once. Rowwise and blocks: the same plus a cost per row. Tensorwise: the
    tensor is read twice, by two kernels, because its amax must be known first. Unscaled: a wider
    source is read and written in 16 bits; a 16-bit one is left as it is.

    Args:
        rows: Rows, batch included.
        columns: Length of the dimension along which a rowwise amax is taken.
        scaling: Grain of the scale.
        chip: Where.
        source_bytes: Bytes per element of the source.
        copies: FP8 copies written: 2 if the transposed one is written in the same pass.

    Raises:
        ConfigurationError: If a dimension is negative.
    """
    _check_dimensions(rows, columns)
    elements = rows * columns
    if elements == 0:
        return 0.0
    if scaling is Scaling.UNSCALED:
        moved = elements * (source_bytes + 2)
        return chip.cast_launch_us + _memory_us(moved, chip) if source_bytes > 2 else 0.0
    once = chip.cast_launch_us + _memory_us(elements * (source_bytes + copies), chip)
    if scaling is Scaling.STATIC:
        return once
    if scaling is not Scaling.TENSORWISE:
        return once + rows * chip.cast_row_ns * 1e-3
    return once + chip.cast_launch_us + _memory_us(elements * source_bytes, chip)


def predicted_speedup(
    role: Role,
    batch: int,
    m: int,
    n: int,
    k: int,
    recipe: Recipe | str,
    chip_name: str,
    baseline: str = "bf16",
    *,
    cast_a: float = 1.0,
    cast_b: float = 1.0,
    source_bytes: int | None = None,
) -> float | None:
    """Return the baseline's time over that of the recipe with its casts; above 1 FP8 is faster.

    Args:
        role: What the product does; a ``norm`` is no product and has no speed-up.
        batch: Number of products.
        m: Rows of the output.
        n: Columns of the output.
        k: Contraction length.
        recipe: The FP8 recipe or a baseline.
        chip_name: The chip, by name.
        baseline: The baseline to compare with.
        cast_a: Share of A's cast that this product pays: 1 alone, 0.5 if another product of the
            layer uses the same cast, 0 if the producer of A writes FP8.
        cast_b: The same for B.
        source_bytes: Bytes per element of operands and output in the original precision; by
            default those of the baseline.

    Returns:
        The ratio; None if the chip has no data or does not compute the recipe (see
        :func:`unsupported`), the role is no product, or nothing is computed.

    Raises:
        UnknownNameError: If recipe or baseline do not exist.
        ConfigurationError: If a dimension is negative or a share lies outside of [0, 1].
    """
    for name, share in (("cast_a", cast_a), ("cast_b", cast_b)):
        if not 0.0 <= share <= 1.0:
            raise ConfigurationError(f"{name} = {share!r} must lie in [0, 1]: a share of one cast")
    if baseline not in BASELINE_RECIPES:
        raise UnknownNameError("baseline", baseline, BASELINE_RECIPES)
    _check_dimensions(batch, m, n, k)
    parsed = parse_recipe(str(recipe))
    chip = CHIPS.get(chip_name)
    if chip is None or role is Role.NORM or batch * m * n == 0:
        return None
    if unsupported(parsed, chip) is not None:
        return None
    width = FORMATS[baseline].torch_dtype.itemsize if source_bytes is None else source_bytes
    time = gemm_time_us(batch, m, n, k, recipe, chip, out_bytes=width)
    if not parsed.is_baseline:
        time += cast_a * cast_time_us(batch * m, k, parsed.scaling_a, chip, source_bytes=width)
        time += cast_b * cast_time_us(batch * n, k, parsed.scaling_b, chip, source_bytes=width)
    return gemm_time_us(batch, m, n, k, baseline, chip, out_bytes=width) / time


def stream_time_us(read_bytes: float, written_bytes: float, chip: ChipData) -> float:
    """Return the time of an element-wise kernel that moves so many bytes, in microseconds."""
    return chip.cast_launch_us + _memory_us(read_bytes + written_bytes, chip)


def _memory_us(moved_bytes: float, chip: ChipData) -> float:
    fits = moved_bytes <= chip.l2_mb * 1e6
    return moved_bytes / ((chip.l2_tb_per_s if fits else chip.copy_tb_per_s) * 1e6)


def unsupported(recipe: Recipe, chip: ChipData) -> str | None:
    """Return why a chip does not compute a recipe; None if it does.

    Sources: PTX ISA, ``tcgen05.mma`` with ``kind::mxf8f6f4`` (sm_100a); AMD's CDNA 3 instruction
    set architecture, whose FP8 formats are the fnuz twins; torch's constraints on block scales.
    """
    if recipe.is_baseline:
        return None
    formats = {recipe.format_a, recipe.format_b}
    if chip.is_fnuz:
        if formats.isdisjoint(FNUZ_FORMATS):
            return (
                f"the matrix cores of {chip.name} multiply the fnuz formats, not those of {recipe}"
            )
    elif not formats.isdisjoint(FNUZ_FORMATS):
        return f"{recipe.format_a} and its twin need gfx942, an AMD CDNA 3 chip"
    have = f"{chip.name} is {chip.architecture}"
    capability = chip.capability or (0, 0)
    if recipe.scaling is Scaling.MXFP8 and capability < (10, 0):
        return f"tensor cores scale blocks of mxfp8 from compute capability 10.0 on, and {have}"
    if recipe.scaling is Scaling.BLOCKWISE and capability != (9, 0):
        return f"blockwise products need compute capability 9.0, and {have}"
    return None


def native_recipe(recipe: Recipe, chip: ChipData) -> Recipe:
    """Return a recipe in the FP8 formats of a chip: the fnuz twins, summed in fp32, on gfx942.

    A recipe of which there is no such twin, mxfp8 for one, is returned as it is.
    """
    if not chip.is_fnuz:
        return recipe
    a, b = (_TWINS.get(name, name) for name in (recipe.format_a, recipe.format_b))
    twin = msgspec.structs.replace(recipe, format_a=a, format_b=b, accumulation=Accumulation.FP32)
    return twin if twin.name in all_recipes() else recipe


_TWINS = {E4M3.name: E4M3FNUZ.name, E5M2.name: E5M2FNUZ.name}


def _arithmetic(recipe: Recipe) -> tuple[str, float]:
    """Return the arithmetic and its slow-down."""
    if recipe.is_baseline:
        return recipe.format_a, 1.0
    if recipe.is_hybrid:
        return next(f.name for f in recipe.formats if not f.is_fp8), 1.0
    fast = recipe.accumulation is Accumulation.FAST
    return "fp8", 1.0 if fast else PROMOTION_SLOWDOWN


def _aligned(length: int, to: int = FP8_ALIGNMENT) -> int:
    return -(-length // to) * to


def _check_dimensions(*dimensions: int) -> None:
    if min(dimensions) < 0:
        raise ConfigurationError(f"dimensions {dimensions} of a product must not be negative")
