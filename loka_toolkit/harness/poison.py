"""Elements that a kernel never writes must show up as NaN, not as the answer of the run before."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Make it likely that memory allocated inside holds NaN until it is written.

    A kernel allocates its own output. On a CPU, torch's deterministic mode fills whatever it
    allocates with NaN; on a GPU that mode would recompile compiled candidates, and blocks of the
    output's size are filled and freed instead, which the caching allocator hands out next.

    Args:
        shape: Shape of the output.
        dtype: Its dtype.
        device: Where it is computed.
    """
    if device.type != "cpu":
        blocks = [torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2)]
        del blocks
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
