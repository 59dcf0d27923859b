"""What is carried from one recorded step to the next: moments, and amax for static scales."""

from __future__ import annotations

import dataclasses

from loka_toolkit.artifacts.sites import Operand
from loka_toolkit.recording.events import EventLog
from loka_toolkit.recording.layers import StepRecord
from loka_toolkit.recording.moments import RunningMoments
from loka_toolkit.recording.units import LossUnits


@dataclasses.dataclass
class StaticAmax:
    """Largest amax of every operand over the earlier sampled steps; g relative to the loss scale.

    Attributes:
        known: Amax by layer name and operand.
    """

    known: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)

    def of_layer(self, layer: str) -> dict[str, float]:
        """Return the amax of a layer's operands by name; that of g at loss scale 1."""
        return {operand: amax for (name, operand), amax in self.known.items() if name == layer}

    def update(self, layer: str, operand: str, amax: float, loss_scale: float) -> None:
        """Note an operand's amax at a step that counted."""
        relative = amax / loss_scale if operand == Operand.G else amax
        key = (layer, operand)
        self.known[key] = max(relative, self.known.get(key, 0.0))


@dataclasses.dataclass
class RunMemory:
    """Moments and amax of every operand over the sampled steps that counted.

    Those of g are relative to the loss scale.

    Attributes:
        moments: Running moments by site and operand.
        static: Largest amax by layer and operand.
    """

    moments: dict[tuple[str, str], RunningMoments] = dataclasses.field(default_factory=dict)
    static: StaticAmax = dataclasses.field(default_factory=StaticAmax)

    def add(self, record: StepRecord, units: LossUnits, events: EventLog) -> None:
        """Add the operands of a step that counted."""
        for sample in record.operands:
            if sample.layer is None or sample.moments is None:
                continue
            site, scale = sample.site, 1.0
            if sample.operand is Operand.G:
                site, scale = sample.layer.gradient_site, units.loss_scale
            key = (str(site), str(sample.operand))
            batch = sample.moments.divided_by(scale)
            running = self.moments.get(key)
            if running is None:
                self.moments[key] = RunningMoments(batch)
            elif running.width == batch.width:
                running.merge(batch)
            else:
                events.add(
                    "width-changed",
                    f"operand {key[1]} of {key[0]} changed its width; its moments are those of the "
                    "first width",
                    record.step,
                )
            amax = sample.statistics["amax"]
            if amax is not None:
                self.static.update(site.layer, key[1], amax, abs(scale))
