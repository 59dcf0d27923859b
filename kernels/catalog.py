"""Every candidate there is: an explicit list, one line per kernel file.

Files are imported when the list is first asked for, and none of them imports a kernel library that
may be absent at import time: such a candidate says so through ``version()``.
"""

from __future__ import annotations

import functools

from loka_toolkit.errors import UnknownNameError
from loka_toolkit.kernels.contract import Candidate


@functools.cache
def catalog() -> tuple[Candidate, ...]:
    """Return every candidate, baselines first."""
    from loka_toolkit.kernels import (
        emulated,
        reference,
        torch_blockwise,
        torch_hybrid,
        torch_matmul,
        torch_scaled_mm,
        triton_scaled_mm,
    )

    return (
        reference.Reference(),
        *torch_matmul.candidates(),
        *torch_scaled_mm.candidates(),
        *torch_blockwise.candidates(),
        *torch_hybrid.candidates(),
        *triton_scaled_mm.candidates(),
        *emulated.candidates(),
    )


def find_candidate(name: str) -> Candidate:
    """Return the candidate of that name.

    Raises:
        UnknownNameError: If there is none; near misses are listed.
    """
    known = {candidate.name: candidate for candidate in catalog()}
    if name not in known:
        raise UnknownNameError("candidate", name, known)
    return known[name]
