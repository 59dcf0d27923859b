"""What a trace says of its operands: the distributions from which replay draws them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from loka_toolkit.artifacts.sites import Operand, SiteKey
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.errors import ReplayError
from loka_toolkit.harness.cross import CrossMoments
from loka_toolkit.harness.features import FeatureMoments, TensorMoments, decode, pooled
from loka_toolkit.harness.spectra import SpectrumMoments

if TYPE_CHECKING:
    import pyarrow as pa

_DISTRIBUTIONS = ("full", "diagonal", "low-rank")


class MomentsOfTrace:
    """The moments of every operand of a trace, decoded when asked for.

    Moments of ``g`` are recorded relative to the loss scale, its statistics per step are not; both
    are brought to the loss scale of the last step, at which training would go on.

    Args:
        trace: The trace.

    Raises:
        ReplayError: If the trace holds no moments.
    """

    def __init__(self, trace: Trace) -> None:
        self._table = trace.moments
        if not self._table.num_rows:
            raise ReplayError(
                f"trace {trace.path} holds no moments, so no realistic inputs can be drawn; "
                "record again with moments=True and at least one sampled step"
            )
        self._rows = _latest_rows(self._table)
        steps = trace.steps
        scales = zip(
            *(steps.column(name).to_pylist() for name in ("step", "rank", "loss_scale")),
            strict=True,
        )
        self._loss_scales = {(step, rank): scale for step, rank, scale in scales if scale}
        last = max(self._loss_scales, default=None)
        self._loss_scale = 1.0 if last is None else self._loss_scales[last]
        self._amax: dict[tuple[str, str], float] = {}
        self._tensor: dict[tuple[str, str], TensorMoments] = {}
        self._read_operands(trace.operands)

    def features(self, layer: str, operand: Operand, width: int) -> FeatureMoments | None:
        """Return the moments of the rows of a layer's operand of that width, or None.

        Ranks are pooled; where products of a batch were told apart, those of the first kind count.

        Raises:
            ArtifactCorruptError: If a row's lists have not the length that its width asks for.
        """
        found = self.slots(layer, operand.value, width, 1)
        return found[0] if found else None

    def slots(
        self, layer: str, operand: str, width: int, sample_rows: int
    ) -> tuple[FeatureMoments, ...]:
        """Return the moments of an operand for each kind of product; none if there are none.

        Args:
            layer: Name of the layer.
            operand: Name of the operand, or ``ab``.
            width: Length of its last logical dimension.
            sample_rows: Rows that make one sample.
        """
        factor = self._loss_scale if operand == Operand.G else 1.0
        kinds = self._kinds(layer, operand, width, sample_rows, _DISTRIBUTIONS)
        return tuple(pooled([decode(row) for row in rows]).times(factor) for rows in kinds)

    def spectra(self, layer: str, width: int) -> tuple[SpectrumMoments, ...]:
        """Return the spectrum of a layer's weight for each kind of product, of the lowest rank."""
        kinds = self._kinds(layer, Operand.W.value, width, 1, ("spectrum",))
        return tuple(SpectrumMoments.decode(rows[0]) for rows in kinds)

    def cross(self, layer: str, outputs: int, inputs: int) -> CrossMoments | None:
        """Return the cross moment of a layer's g and x, ranks pooled, or None."""
        kinds = self._kinds(layer, "gx", outputs + inputs, 1, ("cross",))
        if not kinds:
            return None
        parts = [CrossMoments.decode(row, outputs) for row in kinds[0]]
        return CrossMoments.pooled(parts).times(self._loss_scale)

    def is_tied(self, layer: str) -> bool:
        """Return whether the layer's b is the transpose of its a."""
        return bool(self._kinds(layer, Operand.B.value, 0, 1, ("tied",)))

    def has_whole(self, layer: str, operand: Operand) -> bool:
        """Return whether whole matrices of an operand were recorded, in any shape."""
        return any(
            (of, name) == (layer, operand.value) and sample_rows > 1
            for of, name, _, sample_rows in self._rows
        )

    def _kinds(
        self, layer: str, operand: str, width: int, sample_rows: int, kinds: tuple[str, ...]
    ) -> list[list[dict[str, Any]]]:
        """Return the table's rows, one per rank, for each kind of product."""
        found = self._rows.get((layer, operand, width, sample_rows), {})
        # Whether kinds are told apart may have changed in the run: most samples decide.
        weight: dict[int, int] = defaultdict(int)
        for (slots, _, _), (count, _) in found.items():
            weight[slots] += count
        for slots in sorted(weight, key=lambda s: -weight[s]):
            rows = [
                [
                    row
                    for (of, at, _), (_, index) in sorted(found.items())
                    if (of, at) == (slots, slot) and (row := self._row(index))["kind"] in kinds
                ]
                for slot in range(slots)
            ]
            if all(rows):
                return rows
        return []

    def _row(self, index: int) -> dict[str, Any]:
        return {
            name: value.values.to_numpy(zero_copy_only=False)
            if hasattr(value := self._table.column(name)[index], "values") and value.is_valid
            else value.as_py()
            for name in self._table.column_names
        }

    def widths(self, layer: str, operand: Operand) -> tuple[int, ...]:
        """Return the widths in which moments of a layer's operand were recorded."""
        return tuple(
            sorted(
                width
                for (of_layer, name, width, _), rows in self._rows.items()
                if (of_layer, name) == (layer, operand.value) and rows and width
            )
        )

    def tensor(self, layer: str, operand: Operand) -> TensorMoments | None:
        """Return mean and variance of a layer's operand over all steps; None if unrecorded."""
        return self._tensor.get((layer, operand.value))

    def amax(self, layer: str, operand: Operand) -> float | None:
        """Return the largest finite magnitude recorded of a layer's operand, or None."""
        return self._amax.get((layer, operand.value))

    def _read_operands(self, table: pa.Table) -> None:
        columns = ("step", "rank", "site", "operand", "mean", "variance", "amax", "zero_share")
        grouped: dict[tuple[str, str], list[tuple[Any, ...]]] = defaultdict(list)
        for step, rank, site, operand, mean, variance, amax, zeros in zip(
            *(table.column(name).to_pylist() for name in columns), strict=True
        ):
            factor = 1.0
            if operand == Operand.G:
                factor = self._loss_scale / self._loss_scales.get((step, rank), 1.0)
            grouped[SiteKey.parse(site).layer, operand].append(
                (
                    None if mean is None else mean * factor,
                    None if variance is None else variance * factor**2,
                    None if amax is None else amax * abs(factor),
                    zeros,
                )
            )
        for key, found in grouped.items():
            largest = [row[2] for row in found if row[2] is not None]
            if largest:
                self._amax[key] = max(largest)
            known = [row for row in found if row[0] is not None and row[1] is not None]
            if known:
                center = float(np.mean([row[0] for row in known]))
                square = float(np.mean([row[1] + row[0] ** 2 for row in known]))
                share = float(np.mean([row[3] for row in known]))
                self._tensor[key] = TensorMoments(center, max(0.0, square - center**2), share)


_Found = dict[tuple[int, int, int], tuple[int, int]]


def _latest_rows(table: pa.Table) -> dict[tuple[str, str, int, int], _Found]:
    """Moments accumulate, so of each rank, place and width the row of most samples counts.

    Returns:
        By layer, operand, width and rows of a sample: (slots, slot, rank) -> (count, row of the
        table).
    """
    names = ("rank", "site", "operand", "width", "sample_rows", "slots", "slot", "count")
    best: dict[tuple[str, str, int, int], _Found] = defaultdict(dict)
    columns = (table.column(name).to_pylist() for name in names)
    for row, values in enumerate(zip(*columns, strict=True)):
        rank, site, operand, width, sample_rows, slots, slot, count = values
        found = best[SiteKey.parse(site).layer, operand, width, sample_rows]
        if count and count >= found.get((slots, slot, rank), (0, 0))[0]:
            found[slots, slot, rank] = (count, row)
    return best
