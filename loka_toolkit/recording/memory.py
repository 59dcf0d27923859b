"""What is carried from one recorded step to the next: moments, and amax for static scales."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator

import torch

from loka_toolkit.artifacts.sites import Operand, Role
from loka_toolkit.recording.cross import CrossMoments
from loka_toolkit.recording.events import EventLog
from loka_toolkit.recording.layers import StepRecord
from loka_toolkit.recording.moments import BatchMoments, RunningMoments, flat_float32
from loka_toolkit.recording.places import Place
from loka_toolkit.recording.spectrum import Spectrum
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
class Kept:
    """What is kept of an operand at one place.

    Attributes:
        value: Moments; the last weight; cross moments; None where b is the transpose of a.
        last_step: Step that was added last.
        weight: Of cross moments: weight of all steps so far, relative to the last.
        steps: Of cross moments: steps so far.
    """

    value: RunningMoments | CrossMoments | torch.Tensor | None
    last_step: int
    weight: float = 1.0
    steps: int = 1


def step_decay(last: int, step: int) -> float:
    """Return the weight of steps up to ``last`` relative to a later one: ((last+1)/(step+1))^2.

    So a step counts as the square of its number: moments of a run that was recorded densely at its
    beginning and sparsely later speak of the trained model, and those of a run recorded evenly of
    its last half.
    """
    return ((last + 1) / (step + 1)) ** 2 if step > last else 1.0


@dataclasses.dataclass
class RunMemory:
    """Moments and amax of every operand over the sampled steps that counted.

    Those of g are relative to the loss scale.

    Attributes:
        kept: What is kept by site and place.
        static: Largest amax by layer and operand.
    """

    kept: dict[tuple[str, Place], Kept] = dataclasses.field(default_factory=dict)
    static: StaticAmax = dataclasses.field(default_factory=StaticAmax)

    def add(self, record: StepRecord, units: LossUnits, events: EventLog) -> None:
        """Add the operands of a step that counted."""
        for sample in record.operands:
            if sample.layer is None or sample.moments is None:
                continue
            site, scale = sample.site, 1.0
            if sample.operand is Operand.G:
                site, scale = sample.layer.gradient_site, units.loss_scale
            for place, part in sample.moments.items():
                moments = part.divided_by(scale) if isinstance(part, BatchMoments) else part
                self._add(str(site), place, moments, record.step, events)
            amax = sample.statistics["amax"]
            if amax is not None:
                self.static.update(site.layer, str(sample.operand), amax, abs(scale))
        for layer, cross in record.cross_moments:
            site = layer.site(Role.WGRAD)
            relative = cross.divided_by(units.loss_scale)
            self._add(str(site), Place("gx"), relative, record.step, events)

    def rows(self, rank: int) -> Iterator[dict[str, object]]:
        """Return the rows of the table ``moments``, one at a time."""
        for (site, place), kept in self.kept.items():
            columns = {
                "rank": rank,
                "site": site,
                "operand": place.operand,
                "sample_rows": place.sample_rows,
                "slot": place.slot,
                "slots": place.slots,
            }
            match kept.value:
                case RunningMoments() as moments:
                    row = moments.as_row()
                    row["width"] = moments.width // place.sample_rows
                case CrossMoments() as cross:
                    row = {"count": kept.steps, "steps": kept.steps, **cross.as_row()}
                case torch.Tensor() as weight:
                    row = spectrum_row(weight, zlib.crc32(f"{site}/{place.slot}".encode()))
                case None:
                    row = _TIED
            yield columns | row

    def _add(
        self,
        site: str,
        place: Place,
        part: BatchMoments | CrossMoments | torch.Tensor | None,
        step: int,
        events: EventLog,
    ) -> None:
        kept = self.kept.get((site, place))
        if kept is None:
            value = RunningMoments(part) if isinstance(part, BatchMoments) else part
            self.kept[site, place] = Kept(value, step)
            return
        decay = step_decay(kept.last_step, step)
        try:
            if isinstance(part, BatchMoments) and isinstance(kept.value, RunningMoments):
                kept.value.merge(part, decay)
            elif isinstance(part, CrossMoments) and isinstance(kept.value, CrossMoments):
                kept.weight = kept.weight * decay + 1.0
                kept.value = kept.value.mixed_with(part, 1.0 / kept.weight)
                kept.steps += 1
            else:
                kept.value = part if not isinstance(part, BatchMoments) else RunningMoments(part)
        except ValueError:
            events.add(
                "width-changed",
                f"operand {place.operand} of {site} changed its width; its moments are those of "
                "the first width",
                step,
            )
            return
        kept.last_step = step


def spectrum_row(weight: torch.Tensor, seed: int) -> dict[str, object]:
    """Return the columns of the table ``moments`` that speak of a weight [O, I]."""
    spectrum = Spectrum.of(weight, seed)
    return {
        "count": weight.shape[0],
        "steps": 1,
        "width": weight.shape[1],
        "kind": "spectrum",
        "mean": flat_float32(weight.mean(0)),
        "covariance": flat_float32(spectrum.column_squares),
        "row_norm_quantiles": [],
        "zero_share": float((weight == 0).double().mean()),
        "factors": flat_float32(spectrum.factors),
        "row_squares": flat_float32(spectrum.row_squares),
    }


_TIED: dict[str, object] = {
    "count": 1,
    "steps": 1,
    "width": 0,
    "kind": "tied",
    "mean": [],
    "covariance": [],
    "row_norm_quantiles": [],
    "zero_share": 0.0,
}
