"""What tests of the Triton kernels share: a second opinion on every code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from loka_toolkit.numerics.formats import FP8_FORMATS, FloatFormat

INDEPENDENT: dict[str, Any] = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}


@dataclasses.dataclass(frozen=True)
class SecondOpinion:
    """A format as ml_dtypes has it: nothing here is derived from :class:`FloatFormat`.

    Attributes:
        fmt: The format under test, to pass on.
        dtype: The format in ml_dtypes.
    """

    fmt: FloatFormat
    dtype: Any

    @property
    def nan(self) -> int:
        """The code that every NaN becomes."""
        return 0x80 if "fnuz" in self.fmt.name else 0x7F

    @property
    def midpoints(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Halfway between neighbours among the non-negative finite values, float32, exact."""
        values = np.arange(128, dtype=np.uint8).view(self.dtype).astype(np.float32)
        values = np.unique(values[np.isfinite(values)])
        return ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)

    def codes(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the codes of x / scale, uint8, on the CPU."""
        with np.errstate(all="ignore"):
            y = x.detach().cpu().to(torch.float32).numpy() / scale.detach().cpu().numpy()
            largest = np.float32(ml_dtypes.finfo(self.dtype).max)
            stored = np.clip(y, -largest, largest).astype(self.dtype)
            infinite = np.isinf(y)
            stored[infinite] = y[infinite] if self.fmt.name == "e5m2" else np.nan
            found = stored.view(np.uint8).copy()
            found[np.isnan(stored.astype(np.float32))] = self.nan
        return torch.from_numpy(found)


@pytest.fixture(scope="session", params=FP8_FORMATS.values(), ids=lambda fmt: fmt.name)
def opinion(request: pytest.FixtureRequest) -> SecondOpinion:
    return SecondOpinion(request.param, INDEPENDENT[request.param.name])


@pytest.fixture(scope="session")
def codes_of() -> Callable[[torch.Tensor], torch.Tensor]:
    """Codes of an FP8 tensor, uint8, on the CPU, every NaN by the same code."""

    def of(stored: torch.Tensor) -> torch.Tensor:
        stored = stored.cpu().contiguous()
        codes = stored.view(torch.uint8).clone()
        codes[stored.float().isnan()] = 0x80 if "fnuz" in str(stored.dtype) else 0x7F
        return codes

    return of
