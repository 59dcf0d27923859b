"""The arguments of the recorder, validated before training starts."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from loka_toolkit.errors import ConfigurationError, NoMatchError
from loka_toolkit.numerics.recipes import Recipe, parse_recipe
from loka_toolkit.recording.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class RecorderSettings:
    """Validated arguments of :func:`loka_toolkit.recording.record`; see there.

    Attributes:
        path: Directory of the trace.
        schedule: When to record.
        recipes: Recipes to answer for.
        include: Globs of module paths to record; empty for all.
        exclude: Globs of module paths to leave out.
        rank: Rank of this process.
        world_size: Number of ranks.
        max_rows: Output rows on which errors are computed.
        max_columns: Output columns of gradient products on which errors are computed.
        headroom: Factor of a static scale above the largest amax seen.
        moments_width: Widest operand whose full covariance is kept.
        seed: Seed of the sampling.
        force: Overwrite a trace that is there already.
        upstream_cells: Gradient sites x recipes whose error is followed upstream at each step.
    """

    path: Path
    schedule: Schedule
    recipes: tuple[Recipe, ...]
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    rank: int
    world_size: int
    max_rows: int
    max_columns: int
    headroom: float
    moments_width: int
    seed: int
    force: bool
    upstream_cells: int = 12

    @classmethod
    def validated(
        cls,
        path: str | Path,
        *,
        schedule: Schedule | None,
        recipes: Sequence[str],
        include: Sequence[str],
        exclude: Sequence[str],
        rank: int | None,
        world_size: int | None,
        max_rows: int,
        max_columns: int,
        headroom: float,
        moments_width: int,
        seed: int,
        force: bool,
        upstream_cells: int = 12,
    ) -> RecorderSettings:
        """Check every argument that can be checked without the model.

        Raises:
            UnknownNameError: If a recipe does not exist.
            ConfigurationError: If another argument is wrong.
        """
        if isinstance(recipes, str):
            raise ConfigurationError(f"recipes = {recipes!r} must be a sequence of names")
        for name, value in (("include", include), ("exclude", exclude)):
            if isinstance(value, str):
                raise ConfigurationError(f"{name} = {value!r} must be a sequence of globs")
        parsed = tuple(dict.fromkeys(parse_recipe(name) for name in recipes))
        if not parsed:
            raise ConfigurationError("recipes is empty; name at least one recipe")
        if schedule is not None and not isinstance(schedule, Schedule):
            raise ConfigurationError(f"schedule = {schedule!r} must be a Schedule")
        integers = (
            ("max_rows", max_rows, 1),
            ("max_columns", max_columns, 1),
            ("moments_width", moments_width, 0),
            ("seed", seed, 0),
            ("upstream_cells", upstream_cells, 0),
        )
        for name, number, least in integers:
            _require_int(name, number, least)
        if not (isinstance(headroom, int | float) and 1 <= headroom < math.inf):
            raise ConfigurationError(f"headroom = {headroom!r} must be a number of at least 1")
        rank, world_size = _ranks(rank, world_size)
        return cls(
            path=Path(path),
            schedule=schedule or Schedule(),
            recipes=parsed,
            include=tuple(include),
            exclude=tuple(exclude),
            rank=rank,
            world_size=world_size,
            max_rows=max_rows,
            max_columns=max_columns,
            headroom=float(headroom),
            moments_width=moments_width,
            seed=seed,
            force=bool(force),
            upstream_cells=upstream_cells,
        )

    def check_patterns(self, names: Sequence[str]) -> None:
        """Check that every glob matches a module path.

        Raises:
            NoMatchError: If one matches nothing; near misses are listed.
        """
        for pattern in (*self.include, *self.exclude):
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise NoMatchError("module", pattern, names)

    def selects(self, fqn: str) -> bool:
        """Return whether the sites of a module are recorded."""
        if self.include and not any(fnmatch.fnmatchcase(fqn, p) for p in self.include):
            return False
        return not any(fnmatch.fnmatchcase(fqn, p) for p in self.exclude)

    def as_config(self) -> dict[str, Any]:
        """Return the settings as JSON values; the path is left out: a trace may be moved."""
        config = dataclasses.asdict(self)
        config.pop("path")
        config["recipes"] = [recipe.name for recipe in self.recipes]
        return config


def _require_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} = {value!r} must be an integer of at least {least}")


def _ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if rank is None:
        rank = torch.distributed.get_rank() if distributed else 0
    if world_size is None:
        world_size = torch.distributed.get_world_size() if distributed else max(1, rank + 1)
    _require_int("rank", rank, 0)
    _require_int("world_size", world_size, 1)
    if rank >= world_size:
        raise ConfigurationError(f"rank = {rank} must be less than world_size = {world_size}")
    return rank, world_size
