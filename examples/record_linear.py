"""Record one linear layer.

    python examples/record_linear.py --out RUN

The smallest use of the recorder: wrap the training loop, call step() after each optimizer step.
Everything else, such as the reduction of the loss and the number of examples, is read off the
autograd graph.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.recording import Schedule, record


def main() -> None:
    """Train for a moment under the recorder and print what it found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the trace")
    parser.add_argument("--force", action="store_true", help="overwrite a trace that is there")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Linear(39, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = Schedule(warm_steps=3, every=10)
    with record(model, options.out, schedule=schedule, force=options.force) as recorder:
        for _ in range(30):
            x = torch.randn(256, 39)
            clicks = (x[:, 0] + torch.randn(256) > 0.5).float()
            optimizer.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(model(x).squeeze(-1), clicks)
            loss.backward()
            optimizer.step()
            recorder.step()

    trace = Trace.open(options.out)
    for row in trace.errors.to_pylist():
        if row["step"] == 0:
            first = row["impact_first_order"]
            impact = "" if first is None else f", impact on the mean loss {first:+.1e}"
            print(f"{row['site']:16} {row['recipe']:26} {row['sqnr_db']:5.1f} dB{impact}")
    status = trace.manifest.status
    print(f"{status.steps_recorded} of {status.steps_seen} steps recorded in {options.out}")


if __name__ == "__main__":
    main()
