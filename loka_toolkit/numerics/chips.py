"""Chips as data: what a roofline needs to know of one, by name.

Peak rates (dense) and bandwidths are those of the makers' data sheets:

- NVIDIA H100 and H200 Tensor Core GPU, SXM: FP8 1,979, FP16 and BF16 989.5, TF32 494.7, FP32
  67 TFLOP/s; 3.35 and 4.8 TB/s; 50 MB of L2;
- NVIDIA HGX B200, per GPU: FP8 4,500, FP16 and BF16 2,250, TF32 1,100, FP32 75 TFLOP/s; 7.7 TB/s;
  126 MB of L2;
- AMD Instinct MI300X: FP8 2,614.9, FP16 and BF16 1,307.4, TF32 653.7, FP32 163.4 TFLOP/s; 5.3 TB/s;
  256 MB of Infinity Cache, which stands for the L2 here (17.2 TB/s at peak).

Only the H200's other constants were measured (:mod:`loka_toolkit.numerics.roofline`); the others
take its sustained shares and launch times, and bandwidths in proportion.
"""

from __future__ import annotations

import dataclasses

from loka_toolkit.errors import UnknownNameError


@dataclasses.dataclass(frozen=True)
class ChipData:
    """What the model knows of a chip.

    Attributes:
        name: As in the environment fingerprint.
        architecture: As compilers name it, for example ``sm_90``.
        capability: CUDA compute capability; None of chips that have none.
        is_fnuz: Whether its FP8 formats are e4m3fnuz and e5m2fnuz.
        peak_tflops: Dense peak rate by ``fp8`` or baseline recipe, in TFLOP/s.
        sustained_share: Share of the peak that large GEMMs reach, by the same names.
        copy_tb_per_s: Bandwidth of a large copy, reads and writes counted, in TB/s.
        l2_tb_per_s: The same while all bytes fit the L2.
        l2_mb: Capacity of the L2, in 10**6 bytes.
        gemm_launch_us: Time of a GEMM beyond its work, in microseconds.
        cast_launch_us: The same of an element-wise kernel.
        cast_row_ns: Additional time of a rowwise cast per row, in nanoseconds.
        measured: Whether the constants were measured on this chip.
    """

    name: str
    architecture: str
    capability: tuple[int, int] | None
    is_fnuz: bool
    peak_tflops: dict[str, float]
    sustained_share: dict[str, float]
    copy_tb_per_s: float
    l2_tb_per_s: float
    l2_mb: float
    gemm_launch_us: float
    cast_launch_us: float
    cast_row_ns: float
    measured: bool


def _rates(fp8: float, bf16: float, tf32: float, fp32: float) -> dict[str, float]:
    return {"fp8": fp8, "fp16": bf16, "bf16": bf16, "tf32": tf32, "fp32": fp32}


_COPY_SHARE = 4.3 / 4.8
"""Of the data sheet's bandwidth, what a large copy reaches on an H200."""

H200 = ChipData(
    name="H200",
    architecture="sm_90",
    capability=(9, 0),
    is_fnuz=False,
    peak_tflops=_rates(1979.0, 989.5, 494.7, 67.0),
    sustained_share={"fp8": 0.75, "fp16": 0.8, "bf16": 0.8, "tf32": 0.8, "fp32": 0.8},
    copy_tb_per_s=4.3,
    l2_tb_per_s=8.0,
    l2_mb=50.0,
    gemm_launch_us=3.5,
    cast_launch_us=2.0,
    cast_row_ns=0.25,
    measured=True,
)
H100 = dataclasses.replace(H200, name="H100", copy_tb_per_s=3.35 * _COPY_SHARE, measured=False)
B200 = dataclasses.replace(
    H200,
    name="B200",
    architecture="sm_100",
    capability=(10, 0),
    peak_tflops=_rates(4500.0, 2250.0, 1100.0, 75.0),
    copy_tb_per_s=7.7 * _COPY_SHARE,
    l2_tb_per_s=8.0 * 7.7 / 4.8,
    l2_mb=126.0,
    measured=False,
)
MI300X = dataclasses.replace(
    H200,
    name="MI300X",
    architecture="gfx942",
    capability=None,
    is_fnuz=True,
    peak_tflops=_rates(2614.9, 1307.4, 653.7, 163.4),
    copy_tb_per_s=5.3 * _COPY_SHARE,
    l2_tb_per_s=8.0 * 5.3 / 4.8,
    l2_mb=256.0,
    measured=False,
)

CHIPS: dict[str, ChipData] = {chip.name: chip for chip in (H200, H100, B200, MI300X)}
"""Chips with roofline data. A CPU has none: there is no FP8 tensor core to predict."""


def chip_data(name: str) -> ChipData:
    """Return the data of a chip.

    Raises:
        UnknownNameError: If there are none; near misses are listed.
    """
    if name not in CHIPS:
        raise UnknownNameError("chip", name, CHIPS)
    return CHIPS[name]
