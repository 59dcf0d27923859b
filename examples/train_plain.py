"""A plain training script, which knows nothing of loka_toolkit.

    python examples/train_plain.py --epochs 2
    loka record --out RUN examples/train_plain.py --epochs 2

The second line trains to the same weights, bit for bit, and leaves a trace in RUN.
"""

from __future__ import annotations

import argparse

import torch
from click_model import make_model, rows
from torch.nn import functional


def main() -> None:
    """Train for some epochs and print the loss of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2, help="passes of 20 batches")
    options = parser.parse_args()

    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(options.epochs):
        total = 0.0
        for x, clicks in rows(20):
            optimizer.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(model(x).squeeze(-1), clicks)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: log loss {total / 20:.4f}")


if __name__ == "__main__":
    main()
