"""Compare the model of the fast accumulator with the tensor cores of this GPU.

A product's relative error against float64, for the kernel and for ``numerics.accumulation``, on
operands of one sign and of both, at several depths and output sizes. Small outputs of deep products
are split over K by the library, which shortens every accumulation; large ones are not. The last
line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from loka_toolkit.environment import current_environment
from loka_toolkit.kernels.catalog import find_candidate
from loka_toolkit.kernels.contract import Side
from loka_toolkit.numerics.accumulation import accumulate
from loka_toolkit.numerics.recipes import Accumulation

SAMPLE = 64


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = [
        probe(size, k, accumulation, positive)
        for size in (128, 512, 4096)
        for k in (512, 4096, 16384)
        for accumulation in (Accumulation.FAST, Accumulation.PROMOTED_128)
        for positive in (False, True)
    ]
    result = {
        "environment": current_environment().chip,
        "torch": str(torch.__version__),
        "rows": rows,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def probe(size: int, k: int, accumulation: Accumulation, positive: bool) -> dict[str, object]:
    """Return the errors of kernel and model on a sample of the outputs."""
    generator = torch.Generator("cuda").manual_seed(size + k)
    a, b = (
        torch.randn(shape, generator=generator, device="cuda") for shape in ((size, k), (k, size))
    )
    if positive:
        a, b = a.abs(), b.abs()
    candidate = find_candidate(f"torch.scaled_mm/e4m3/tensorwise/{accumulation}")
    left, right = candidate.prepare(a, Side.A), candidate.prepare(b, Side.B)
    out = candidate.run(left, right, torch.float32)[:SAMPLE, :SAMPLE].double()
    assert left.scale is not None
    assert right.scale is not None
    scale = left.scale.double() * right.scale.double()
    data_a, data_b = left.data[:SAMPLE], right.data[:, :SAMPLE]
    exact = data_a.double() @ data_b.double() * scale
    model = accumulate(data_a, data_b, accumulation).double() * scale
    return {
        "m_and_n": size,
        "k": k,
        "accumulation": accumulation.value,
        "signs": "one" if positive else "both",
        "hardware_error": float((out - exact).norm() / exact.norm()),
        "model_error": float((model - exact).norm() / exact.norm()),
        "equal_share": float((out.float() == model.float()).double().mean()),
    }


if __name__ == "__main__":
    main()
