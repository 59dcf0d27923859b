"""torch's own FP8 product: ``torch.nn.functional.scaled_mm`` on CUDA, ``torch._scaled_mm`` on CPU.

What the accumulations of the recipes mean here:

- ``fast`` (CUDA only): ``use_fast_accum=True``; sums stay in the tensor core's accumulator.
- ``promoted-128`` (CUDA only): ``use_fast_accum=False``; cuBLASLt and CUTLASS promote the sums to
  float32 at regular intervals (CUTLASS: every 4 instructions of 32 products by default).
- ``fp32`` (CPU only): float32 sums. No NVIDIA kernel of torch offers it.

Constraints of CUDA: compute capability 8.9; K and N multiples of 16, met by zero padding; A
row-major and B column-major; at least one factor in E4M3. With row-wise scales CUTLASS
writes bfloat16 only; cuBLASLt, which torch uses at compute capability 9.0 from CUDA 12.9 on, writes
every dtype (pytorch pull requests 162022 and 166744). The CPU accepts any shape and every pair of
formats, which proves nothing about CUDA; both go through the same padding here.

scaled_mm has no batches, so a batch of products is as many calls, one after the other. That is what
a replay times; it pays where the products are few and large, if anywhere.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.errors import ConfigurationError
from loka_toolkit.kernels.contract import Chip, Prepared, Problem, Side
from loka_toolkit.kernels.reference import PRODUCT_ROLES
from loka_toolkit.numerics.casting import cast
from loka_toolkit.numerics.formats import E5M2, FNUZ_FORMATS
from loka_toolkit.numerics.recipes import Accumulation, Recipe, Scaling, all_recipes
from loka_toolkit.numerics.scaling import operand_scale

ALIGNMENT = 16
FP8_CAPABILITY = (8, 9)
CUBLAS_ROWWISE_CAPABILITY = (9, 0)
CUBLAS_ROWWISE_CUDA = (12, 9)
LARGEST_BATCH, LARGEST_CUDA_BATCH = 1024, 16
"""Products of a batch at most, on a CPU and on CUDA, where each is a kernel launch."""
OUTPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class TorchScaledMM:
    """A recipe computed by torch's scaled_mm.

    Attributes:
        fp8: The recipe.
    """

    fp8: Recipe
    library: str = "torch"
    roles: frozenset[Role] = PRODUCT_ROLES
    emulated: bool = False
    abi: int = 1

    @property
    def recipe(self) -> str:
        """Name of the recipe."""
        return self.fp8.name

    @property
    def name(self) -> str:
        """Name of the candidate."""
        return f"torch.scaled_mm/{self.fp8.name}"

    @property
    def operator(self) -> str:
        """What is called."""
        if self.fp8.accumulation is Accumulation.FP32:
            return "aten::_scaled_mm"
        fast = self.fp8.accumulation is Accumulation.FAST
        return f"torch.nn.functional.scaled_mm(use_fast_accum={fast})"

    @property
    def _is_rowwise(self) -> bool:
        return Scaling.ROWWISE in self.fp8.scalings

    def version(self) -> str | None:
        """Return the version of torch."""
        return str(torch.__version__)

    def supports(self, problem: Problem, chip: Chip) -> str | None:
        """Return None, or the constraint that is not met."""
        if problem.role not in self.roles:
            return f"role {problem.role} is no product"
        largest = LARGEST_BATCH if chip.capability is None else LARGEST_CUDA_BATCH
        if problem.batch > largest:
            return (
                f"scaled_mm multiplies one pair of matrices at a time, and {problem.batch} calls "
                f"are too many (limit {largest})"
            )
        if {f.name for f in self.fp8.formats} & set(FNUZ_FORMATS):
            return f"{self.fp8.format_a} needs gfx942 (AMD CDNA 3), and {chip.name} is none"
        if problem.dtype not in OUTPUT_DTYPES:
            return f"scaled_mm does not write {problem.dtype}"
        if chip.capability is None:
            if self.fp8.accumulation is not Accumulation.FP32:
                return f"{self.fp8.accumulation} accumulation exists on CUDA only; a CPU sums fp32"
            return None
        return self._cuda_constraint(problem, chip.name, chip.capability)

    def _cuda_constraint(
        self, problem: Problem, chip_name: str, capability: tuple[int, int]
    ) -> str | None:
        have = f"{chip_name} has {capability[0]}.{capability[1]}"
        if capability < FP8_CAPABILITY:
            return f"FP8 tensor cores need compute capability 8.9 and {have}"
        if self.fp8.accumulation is Accumulation.FP32:
            return "no CUDA kernel of scaled_mm sums in float32 throughout; see promoted-128"
        if self.fp8.format_a == self.fp8.format_b == E5M2.name:
            return "CUDA refuses e5m2 times e5m2; one factor must be e4m3"
        if self._is_rowwise and problem.dtype is not torch.bfloat16:
            if capability != CUBLAS_ROWWISE_CAPABILITY:
                return (
                    f"row-wise scaling writes {problem.dtype} at compute capability 9.0 only and "
                    f"{have}; it writes torch.bfloat16 on any"
                )
            if cuda_version() < CUBLAS_ROWWISE_CUDA:
                return (
                    f"row-wise scaling writes {problem.dtype} from CUDA 12.9 on and torch was "
                    f"built for {torch.version.cuda}; it writes torch.bfloat16 with any"
                )
        return None

    def prepare(
        self, operand: torch.Tensor, side: Side, scale: torch.Tensor | None = None
    ) -> Prepared:
        """Cast one factor, lay it out along the contraction and pad it with zeros.

        A becomes [.., M, K'] row-major, B becomes [.., K', N'] column-major; K' and N' are
        multiples of 16. Scales of padded columns of B are 1.

        Raises:
            ConfigurationError: If the operand is neither a matrix nor a batch of them, or static
                scaling lacks its scale.
        """
        if operand.ndim not in (2, 3):
            raise ConfigurationError(
                f"{self.name} multiplies matrices, one or a batch of them, not tensors of shape "
                f"{tuple(operand.shape)}"
            )
        which = 0 if side is Side.A else 1
        fmt = self.fp8.formats[which]
        if scale is None:
            scale = operand_scale(operand, fmt, self.fp8.scalings[which], side.value)
        stored = cast(operand, fmt, scale)
        if self._is_rowwise and scale.ndim < 2:
            # The kernel wants both scales by row: one number repeats.
            rows = (*operand.shape[:-1], 1), (*operand.shape[:-2], 1, operand.shape[-1])
            scale = scale * scale.new_ones(rows[which])
        if side is Side.A:
            data = padded(stored, stored.shape[-2], _aligned(stored.shape[-1]))
            return Prepared(data, scale, operand.shape, side)
        k, n = _aligned(stored.shape[-2]), _aligned(stored.shape[-1])
        if self._is_rowwise:
            columns = scale.reshape(*stored.shape[:-2], 1, stored.shape[-1])
            ones = scale.new_ones(*stored.shape[:-2], 1, n - stored.shape[-1])
            scale = torch.cat([columns, ones], dim=-1)
        return Prepared(padded(stored.mT, n, k).mT, scale, operand.shape, side)

    def run(self, a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
        """Return the product [.., M, N], unpadded.

        Raises:
            ConfigurationError: If an operand was not scaled.
        """
        if a.scale is None or b.scale is None:
            raise ConfigurationError(f"{self.name} needs scaled operands; use its own prepare()")
        m, n = a.shape[-2], b.shape[-1]
        leading = a.shape[:-2]
        if 0 in (*leading, m, n, a.shape[-1]):
            return torch.zeros(*leading, m, n, dtype=out_dtype, device=a.data.device)
        if not leading:
            return self._product(a.data, b.data, a.scale, b.scale, out_dtype)[:m, :n]
        return torch.stack(
            [
                self._product(
                    a.data[item],
                    b.data[item],
                    _scale_of(a.scale, item),
                    _scale_of(b.scale, item),
                    out_dtype,
                )[:m, :n]
                for item in range(leading[0])
            ]
        )

    def _product(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        if self.fp8.accumulation is not Accumulation.FP32:
            return self._cuda_product(a, b, scale_a, scale_b, out_dtype)
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype)

    def _cuda_product(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        kinds = functional.ScalingType
        grain = kinds.RowWise if self._is_rowwise else kinds.TensorWise
        return functional.scaled_mm(
            a,
            b,
            scale_a,
            grain,
            scale_b,
            grain,
            output_dtype=out_dtype,
            use_fast_accum=self.fp8.accumulation is Accumulation.FAST,
        )


_SCALINGS = (Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.STATIC)


def candidates() -> tuple[TorchScaledMM, ...]:
    """Return one candidate per FP8 recipe; ``supports`` says where each exists."""
    return tuple(
        TorchScaledMM(recipe)
        for recipe in all_recipes().values()
        if set(recipe.scalings) <= set(_SCALINGS)
    )


def cuda_version() -> tuple[int, ...]:
    """Return the CUDA version of this torch; that of today's wheels where it was built without."""
    if torch.version.cuda is None:
        return (13, 0)
    return tuple(int(part) for part in torch.version.cuda.split(".")[:2])


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _scale_of(scale: torch.Tensor, item: int) -> torch.Tensor:
    """Return the scale of one product of a batch: its own row-wise scales, or everyone's scalar."""
    return scale[item] if scale.ndim == 3 else scale


def padded(stored: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return a contiguous copy with zeros (code 0 in every FP8 format) at the end of both dims."""
    leading = stored.shape[:-2]
    out = torch.zeros(*leading, rows, columns, dtype=torch.uint8, device=stored.device)
    out[..., : stored.shape[-2], : stored.shape[-1]] = stored.view(torch.uint8)
    return out.view(stored.dtype)
