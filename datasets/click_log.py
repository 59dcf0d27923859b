"""Generated click logs with the traits that make recommendation data hard for FP8.

Dense features are heavy-tailed counts with blanks, as Criteo's are: a zero-inflated log-normal
whose upper tail reaches 10^5. Categories follow Zipf laws. The click probability has planted
structure: effects of the log counts and of the categories, and an inner product between hidden
user and item vectors that a two-tower model can learn.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from loka_toolkit.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class ClickLogSpec:
    """Shape of a generated log.

    Attributes:
        user_counts: Dense columns that describe the user.
        item_counts: Dense columns that describe the item.
        user_cardinalities: Sizes of the user's categorical vocabularies.
        item_cardinalities: Sizes of the item's.
        zipf_exponent: Exponent of the categories' rank-frequency law.
        count_log_sd: Standard deviation of the natural logarithm of the counts.
        blank_share: Share of counts that are blank (read as zero, as those that round down to it).
        hidden: Width of the planted user and item vectors.
        base_logit: Intercept; -2.2 gives about one click in eight.
    """

    user_counts: int = 7
    item_counts: int = 6
    user_cardinalities: tuple[int, ...] = (5000, 800, 100, 20)
    item_cardinalities: tuple[int, ...] = (3000, 500, 60, 12)
    zipf_exponent: float = 1.1
    count_log_sd: float = 2.2
    blank_share: float = 0.2
    hidden: int = 4
    base_logit: float = -2.2

    def validated(self) -> ClickLogSpec:
        """Return self if the numbers make sense.

        Raises:
            ConfigurationError: Naming the field and its limits.
        """
        if min(self.user_counts, self.item_counts, self.hidden) < 1:
            raise ConfigurationError("user_counts, item_counts and hidden must be at least 1")
        if not self.user_cardinalities or not self.item_cardinalities:
            raise ConfigurationError("user and item need at least one category each")
        if min(self.user_cardinalities + self.item_cardinalities) < 2:
            raise ConfigurationError("every vocabulary needs at least 2 entries")
        if not 0.0 <= self.blank_share < 1.0:
            raise ConfigurationError(f"blank_share = {self.blank_share} must lie in [0, 1)")
        return self


@dataclasses.dataclass(frozen=True)
class ClickBatch:
    """Rows of a click log.

    Attributes:
        user_counts: float32 [rows, user_counts], raw.
        item_counts: float32 [rows, item_counts], raw.
        user_categories: int64 [rows, user vocabularies].
        item_categories: int64 [rows, item vocabularies].
        clicks: float32 [rows], 0 or 1.
        probability: float64 [rows], the planted click probability.
    """

    user_counts: NDArray[np.float32]
    item_counts: NDArray[np.float32]
    user_categories: NDArray[np.int64]
    item_categories: NDArray[np.int64]
    clicks: NDArray[np.float32]
    probability: NDArray[np.float64]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.clicks)


class ClickLog:
    """A world with planted parameters from which any number of batches can be drawn.

    Args:
        spec: Shape of the log.
        seed: Seed of the planted parameters; batches have seeds of their own.
    """

    def __init__(self, spec: ClickLogSpec | None = None, seed: int = 0) -> None:
        self.spec = (spec or ClickLogSpec()).validated()
        rng = np.random.default_rng([seed, 1])
        spec = self.spec
        self._user_effects = [rng.normal(0, 0.35, c) for c in spec.user_cardinalities]
        self._item_effects = [rng.normal(0, 0.35, c) for c in spec.item_cardinalities]
        self._user_vectors = rng.normal(0, 0.8, (spec.user_cardinalities[0], spec.hidden))
        self._item_vectors = rng.normal(0, 0.8, (spec.item_cardinalities[0], spec.hidden))
        self._count_effects = rng.normal(0, 0.12, spec.user_counts + spec.item_counts)
        self._count_centers = rng.uniform(0.5, 4.5, spec.user_counts + spec.item_counts)
        self._seed = seed

    def batch(self, rows: int, seed: int) -> ClickBatch:
        """Draw rows.

        Args:
            rows: Number of rows.
            seed: Seed of this batch; the same seed gives the same rows.
        """
        spec = self.spec
        rng = np.random.default_rng([self._seed, 2, seed])
        counts = self._counts(rng, rows)
        users = [_zipf(rng, c, spec.zipf_exponent, rows) for c in spec.user_cardinalities]
        items = [_zipf(rng, c, spec.zipf_exponent, rows) for c in spec.item_cardinalities]
        logit = np.full(rows, spec.base_logit)
        logit += (np.log1p(counts) - self._count_centers) @ self._count_effects
        for effects, ids in zip(
            self._user_effects + self._item_effects, users + items, strict=True
        ):
            logit += effects[ids]
        logit += np.sum(self._user_vectors[users[0]] * self._item_vectors[items[0]], axis=1)
        probability = 1.0 / (1.0 + np.exp(-logit))
        clicks = rng.random(rows) < probability
        return ClickBatch(
            user_counts=counts[:, : spec.user_counts].astype(np.float32),
            item_counts=counts[:, spec.user_counts :].astype(np.float32),
            user_categories=np.stack(users, axis=1),
            item_categories=np.stack(items, axis=1),
            clicks=clicks.astype(np.float32),
            probability=probability,
        )

    def _counts(self, rng: np.random.Generator, rows: int) -> NDArray[np.float64]:
        logs = rng.normal(
            self._count_centers, self.spec.count_log_sd, (rows, len(self._count_centers))
        )
        counts = np.floor(np.exp(np.minimum(logs, np.log(2e6))))
        return np.where(rng.random(counts.shape) < self.spec.blank_share, 0.0, counts)


def _zipf(
    rng: np.random.Generator, cardinality: int, exponent: float, rows: int
) -> NDArray[np.int64]:
    weights = np.arange(1, cardinality + 1, dtype=np.float64) ** -exponent
    return rng.choice(cardinality, size=rows, p=weights / weights.sum()).astype(np.int64)
