"""How much faster a cell would run: measured where there is a replay, else predicted, else none."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

from loka_toolkit.analysis.observations import SiteFacts
from loka_toolkit.artifacts.replay_results import ReplayResults, ReplayRow, Status
from loka_toolkit.artifacts.safety_map import FAST_SPEEDUP, SpeedEvidence
from loka_toolkit.numerics.chips import chip_data
from loka_toolkit.numerics.recipes import DEFAULT_RECIPES, all_recipes, parse_recipe
from loka_toolkit.numerics.roofline import predicted_speedup


@dataclasses.dataclass(frozen=True)
class Speed:
    """A speed-up and what it rests on.

    Attributes:
        speedup: Time of the default over that of FP8 with its casts, or None.
        evidence: Where it comes from.
    """

    speedup: float | None
    evidence: SpeedEvidence

    @property
    def fast(self) -> bool:
        """Whether it is worth while."""
        return self.speedup is not None and self.speedup >= FAST_SPEEDUP


NO_SPEED = Speed(None, SpeedEvidence.NONE)


@dataclasses.dataclass(frozen=True)
class SpeedBook:
    """Answers for every cell.

    Attributes:
        rows: Site -> timed rows of the replay; None without a replay.
        chip: Chip to predict for, or None.
    """

    rows: Mapping[str, tuple[ReplayRow, ...]] | None
    chip: str | None

    @classmethod
    def of(cls, replay: ReplayResults | None, chip: str | None) -> SpeedBook:
        """Collect what is known.

        Raises:
            UnknownNameError: If there is no roofline data for ``chip``.
        """
        if chip is not None:
            chip_data(chip)
        if replay is None:
            return cls(None, chip)
        rows: defaultdict[str, list[ReplayRow]] = defaultdict(list)
        for row in replay.rows:
            if row.status is Status.OK and not row.emulated and row.latency_us:
                rows[row.site].append(row)
        return cls({site: tuple(found) for site, found in rows.items()}, chip)

    def speed(self, site: SiteFacts, recipe: str) -> Speed:
        """Return the speed-up of a site under a recipe."""
        measured = None
        if self.rows is not None:
            measured = measured_speedup(self.rows.get(str(site.key), ()), recipe)
        if measured is not None:
            return Speed(measured, SpeedEvidence.MEASURED)
        if self.chip is None or site.dtype not in DEFAULT_RECIPES:
            return NO_SPEED
        predicted = predicted_speedup(
            site.key.role,
            site.batch,
            site.m,
            site.n,
            site.k,
            recipe,
            self.chip,
            baseline=DEFAULT_RECIPES[site.dtype][0],
        )
        return NO_SPEED if predicted is None else Speed(predicted, SpeedEvidence.PREDICTED)


def measured_speedup(rows: tuple[ReplayRow, ...], recipe: str) -> float | None:
    """Return the best measured speed-up at the largest shape that was timed both ways.

    A candidate serves a recipe if it casts alike and its sums are no less exact.
    """
    judged, known = parse_recipe(recipe), all_recipes()
    by_shape: defaultdict[tuple[int, int, int, int], list[ReplayRow]] = defaultdict(list)
    for row in rows:
        by_shape[(row.batch, row.m, row.n, row.k)].append(row)
    largest = sorted(by_shape, key=lambda s: s[0] * s[1] * s[2] * s[3], reverse=True)
    for shape in largest:
        defaults, candidates = [], []
        for row in by_shape[shape]:
            if row.recipe in DEFAULT_RECIPES.get(row.dtype, ()):
                defaults.append(row.latency_us)
            elif row.recipe in known and judged.is_covered_by(known[row.recipe]):
                candidates.append(row.latency_us)
        if defaults and candidates:
            return min(t for t in defaults if t) / min(t for t in candidates if t)
    return None
