"""What a reader of the trace must know, counted; and warnings that can never raise."""

from __future__ import annotations

import dataclasses
import logging
import warnings

from loka_toolkit.artifacts.trace import Event

_logger = logging.getLogger("loka_toolkit.recording")


@dataclasses.dataclass
class EventLog:
    """Events by kind and message; the first occurrence of a kind is also a warning if asked for."""

    _events: dict[tuple[str, str], Event] = dataclasses.field(default_factory=dict)
    _warned: set[str] = dataclasses.field(default_factory=set)

    def add(self, kind: str, message: str, step: int | None = None, *, warn: bool = False) -> None:
        """Count an event; ``warn`` shows it once per kind as a UserWarning."""
        known = self._events.get((kind, message))
        if known is None:
            self._events[kind, message] = Event(kind=kind, message=message, step=step)
        else:
            self._events[kind, message] = Event(
                kind=kind, message=message, step=known.step, count=known.count + 1
            )
        if warn and kind not in self._warned:
            self._warned.add(kind)
            warn_safely(f"loka recorder: {message}")

    def snapshot(self) -> tuple[Event, ...]:
        """Return the events in order of their first occurrence."""
        return tuple(self._events.values())


def warn_safely(message: str) -> None:
    """Issue a UserWarning; where warnings are errors, log it: a recorder never raises."""
    try:
        warnings.warn(message, UserWarning, stacklevel=3)
    except UserWarning:
        _logger.warning(message)
