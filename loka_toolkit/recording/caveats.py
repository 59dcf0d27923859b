"""What a reader of the trace must know of a recorded step."""

from __future__ import annotations

from collections.abc import Iterator

from loka_toolkit.recording.layers import StepRecord
from loka_toolkit.recording.products import INSTALLED_TABLE


def step_caveats(record: StepRecord) -> Iterator[tuple[str, str]]:
    """Yield kind and message of every event that a step which counted gives rise to."""
    if INSTALLED_TABLE in record.flops_not_judged:
        yield "installed-table", f"products of a recorded step were {INSTALLED_TABLE}"
    elif not record.layers:
        yield (
            "nothing-seen",
            "a recorded step held no product that could be judged; was the model called, with "
            "gradients?",
        )
