"""What the sampler sees: statistics in long form, and which group every cell belongs to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_toolkit.analysis.observations import IntArray
from loka_toolkit.artifacts.safety_map import Criterion
from loka_toolkit.numerics.posterior import FloatArray, Statistics


@dataclasses.dataclass(frozen=True)
class Factor:
    """A grouping of cells whose effects sum to zero.

    Attributes:
        name: ``role``, ``recipe`` or ``module_type``.
        levels: Names of the groups.
        of_cell: [C] index into ``levels``.
    """

    name: str
    levels: tuple[str, ...]
    of_cell: IntArray

    @classmethod
    def of(cls, name: str, labels: Sequence[str]) -> Factor:
        """Return the factor that the labels of the cells describe; levels sorted."""
        levels, codes = np.unique(np.asarray(labels, dtype=object).astype(str), return_inverse=True)
        return cls(name, tuple(str(level) for level in levels), codes.astype(np.int64))


@dataclasses.dataclass(frozen=True)
class Design:
    """Cells, their groups and the statistics of the criteria that are fitted together.

    A *group* is a combination of levels that occurs; its location is the grand mean plus
    ``contrasts @ effects``. Groups and entries are those of all J fitted criteria, criterion-major.

    Attributes:
        criteria: The J criteria.
        centers: [J] location of the prior of the grand mean, dB.
        factors: Those with two levels or more.
        blocks: [P] index of the factor that a coefficient belongs to.
        contrasts: [G, P] coefficients -> deviation of a group from the grand mean.
        group_of_cell: [C] index of the group, without regard to the criterion.
        entry_criterion: [E] criterion of an entry: a cell that has values of it.
        entry_group: [E] index into the G groups.
        count: [E] steps.
        mean: [E] dB.
        squares: [E] dB^2.
        tally_criterion: [T] criterion of a distinct count.
        tally_count: [T] the count.
        tally_weight: [T] entries that have it.
    """

    criteria: tuple[Criterion, ...]
    centers: FloatArray
    factors: tuple[Factor, ...]
    blocks: IntArray
    contrasts: FloatArray
    group_of_cell: IntArray
    entry_criterion: IntArray
    entry_group: IntArray
    count: FloatArray
    mean: FloatArray
    squares: FloatArray
    tally_criterion: IntArray
    tally_count: FloatArray
    tally_weight: FloatArray

    @property
    def groups(self) -> int:
        """Number of groups."""
        return len(self.contrasts)


def basis(levels: int) -> FloatArray:
    """Return orthonormal columns [levels, levels - 1] that each sum to zero (Helmert)."""
    columns = np.zeros((levels, levels - 1))
    for j in range(1, levels):
        columns[:j, j - 1] = 1.0
        columns[j, j - 1] = -float(j)
    return np.asarray(columns / np.linalg.norm(columns, axis=0))


def build(
    statistics: Mapping[Criterion, Statistics],
    centers: Mapping[Criterion, float],
    factors: Sequence[Factor],
) -> Design:
    """Lay out the statistics of some criteria for the sampler.

    Args:
        statistics: Per criterion, statistics [C]; cells with a count of 0 are left out.
        centers: Per criterion, location of the prior of the grand mean, dB.
        factors: Groupings of the cells; those with a single level have no effect and are dropped.
    """
    criteria = tuple(statistics)
    varying = tuple(factor for factor in factors if len(factor.levels) > 1)
    cells = len(next(iter(statistics.values())).count)
    codes = np.zeros((cells, 0), np.int64)
    if varying:
        codes = np.stack([factor.of_cell for factor in varying], axis=1)
    combinations, group_of_cell = np.unique(codes, axis=0, return_inverse=True)
    parts = [basis(len(f.levels))[combinations[:, i]] for i, f in enumerate(varying)]
    contrasts = np.concatenate([np.zeros((len(combinations), 0)), *parts], axis=1)
    present = [np.flatnonzero(statistics[c].count > 0) for c in criteria]
    group_of_cell = group_of_cell.reshape(cells)
    tallies = [
        np.unique(statistics[c].count[p], return_counts=True)
        for c, p in zip(criteria, present, strict=True)
    ]
    numbers = np.arange(len(criteria))
    return Design(
        criteria=criteria,
        centers=np.array([centers[c] for c in criteria]),
        factors=varying,
        blocks=np.repeat(np.arange(len(varying)), [len(f.levels) - 1 for f in varying]),
        contrasts=contrasts,
        group_of_cell=group_of_cell,
        entry_criterion=np.repeat(numbers, [len(p) for p in present]),
        entry_group=np.concatenate([group_of_cell[p] for p in present]),
        count=_joined([statistics[c].count[p] for c, p in zip(criteria, present, strict=True)]),
        mean=_joined([statistics[c].mean[p] for c, p in zip(criteria, present, strict=True)]),
        squares=_joined([statistics[c].squares[p] for c, p in zip(criteria, present, strict=True)]),
        tally_criterion=np.repeat(numbers, [len(counts) for counts, _ in tallies]),
        tally_count=_joined([counts for counts, _ in tallies]),
        tally_weight=_joined([weights for _, weights in tallies]),
    )


def _joined(parts: Sequence[npt.NDArray[Any]]) -> FloatArray:
    return np.concatenate(parts).astype(np.float64)
