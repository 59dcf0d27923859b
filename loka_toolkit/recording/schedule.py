"""When to record: some steps in a row at the beginning, then one now and then."""

from __future__ import annotations

import dataclasses

from loka_toolkit.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which optimizer steps are recorded; the others cost nothing.

    ``Schedule(warm_steps=20, every=1000)`` reads: the first 20 steps, then every 1000th.

    Attributes:
        start: First step that may be recorded, counted from 0.
        warm_steps: Steps at the beginning that are recorded densely.
        warm_every: During those, record every so many steps.
        every: After those, record every so many steps; None to record no more.
        stop: First step that is not recorded any more; None for no end.

    Raises:
        ConfigurationError: If a value is out of range, or no step could ever be recorded.
    """

    start: int = 0
    warm_steps: int = 20
    warm_every: int = 1
    every: int | None = 1000
    stop: int | None = None

    def __post_init__(self) -> None:
        """Validate."""
        for name, least in (("start", 0), ("warm_steps", 0), ("warm_every", 1)):
            self._require_int(name, getattr(self, name), least)
        if self.every is not None:
            self._require_int("every", self.every, 1)
        if self.stop is not None:
            self._require_int("stop", self.stop, 1)
            if self.stop <= self.start:
                raise ConfigurationError(
                    f"schedule.stop = {self.stop} must be larger than schedule.start = "
                    f"{self.start}, or no step is recorded"
                )
        if self.warm_steps == 0 and self.every is None:
            raise ConfigurationError(
                "schedule.warm_steps = 0 and schedule.every = None record no step; "
                "give one of them a positive number"
            )

    @classmethod
    def always(cls) -> Schedule:
        """Return the schedule that records every step."""
        return cls(warm_steps=0, every=1)

    def is_active(self, step: int) -> bool:
        """Return whether an optimizer step, counted from 0, is recorded."""
        if step < self.start or (self.stop is not None and step >= self.stop):
            return False
        since = step - self.start
        if since < self.warm_steps:
            return since % self.warm_every == 0
        return self.every is not None and (since - self.warm_steps) % self.every == 0

    @staticmethod
    def _require_int(name: str, value: object, least: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(
                f"schedule.{name} = {value!r} must be an integer of at least {least}"
            )
