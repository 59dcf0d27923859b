"""What a reader of the trace must know of a recorded step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loka_toolkit.recording.layers import StepRecord
from loka_toolkit.recording.products import INSTALLED_TABLE


def step_caveats(record: StepRecord, compiled: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield kind and message of what a step that counted gives rise to, and whether to warn.

    Args:
        record: The step.
        compiled: Modules of which it was said already that they are compiled.
    """
    if record.has_compiled_code and not compiled:
        yield (
            "compiled-code",
            "functions compiled by torch.compile ran eagerly in recorded steps",
            False,
        )
    if INSTALLED_TABLE in record.flops_not_judged:
        yield "installed-table", f"products of a recorded step were {INSTALLED_TABLE}", True
    elif not record.layers:
        yield (
            "nothing-seen",
            "a recorded step held no product that could be judged; was the model called, with "
            "gradients?",
            True,
        )
