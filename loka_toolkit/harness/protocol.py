"""What the process that runs candidates and its parent say to each other, as JSON lines."""

from __future__ import annotations

import msgspec

from loka_toolkit.harness.bench import Measured


class Request(msgspec.Struct, frozen=True):
    """Measure one row.

    Attributes:
        workload: Index among the workloads of the trace.
        candidate: Name of the candidate.
        self_destruct_seconds: The process ends itself after so long, should its parent be gone.
    """

    workload: int
    candidate: str
    self_destruct_seconds: int


class Phase(msgspec.Struct, frozen=True, tag="phase"):
    """A phase of the row has begun.

    Attributes:
        name: ``asking``, ``drawing``, ``judging`` or ``timing``.
        inputs: Where the inputs came from, as far as is known then.
    """

    name: str
    inputs: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The trace is open and the candidates are listed."""

    workloads: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The process cannot start."""

    message: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The row is measured."""

    measured: Measured


Message = Phase | Ready | Refused | Done
