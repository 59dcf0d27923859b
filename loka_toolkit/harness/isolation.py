"""The parent's side of the worker process: ask for rows, give up on those that do not come."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from loka_toolkit.artifacts.replay_results import Status
from loka_toolkit.errors import ReplayError
from loka_toolkit.harness.bench import NOT_DRAWN, BenchSettings, Measured
from loka_toolkit.harness.outcome import Outcome
from loka_toolkit.harness.protocol import Done, Message, Phase, Ready, Refused, Request

START_SECONDS = 300.0
"""For importing libraries and opening the trace."""

DRAW_SECONDS = 600.0
"""For drawing inputs and their float64 reference, which no candidate is to blame for."""

_decoder = msgspec.json.Decoder(Message)


class WorkerGoneError(Exception):
    """The worker ended or fell silent; the message says how."""


class IsolatedBench:
    """Measures rows in a worker process, started when needed and replaced when it is lost.

    Args:
        settings: What the worker measures and how.
    """

    def __init__(self, settings: BenchSettings) -> None:
        self._settings = settings
        self._worker: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._pending = b""

    def __enter__(self) -> IsolatedBench:
        """Return self."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the worker."""
        self.close()

    def measure(self, workload: int, candidate: str) -> Measured:
        """Return the outcome of one row; a lost worker is an outcome too.

        Args:
            workload: Index among the workloads of the trace.
            candidate: Name of the candidate.

        Raises:
            ReplayError: If no worker can be started.
        """
        if self._worker is None:
            self._start()
        limit = self._settings.policy.row_seconds
        phase, began, inputs = "asking", time.monotonic(), NOT_DRAWN
        request = Request(workload, candidate, int(2 * (limit + DRAW_SECONDS)) + 1)
        try:
            self._send(msgspec.json.encode(request))
            while True:
                allowed = DRAW_SECONDS if phase == "drawing" else limit
                message = self._receive(began + allowed)
                if isinstance(message, Done):
                    if message.measured.unusable is not None:
                        self.close()
                    return message.measured
                if isinstance(message, Phase):
                    # Drawing is not the candidate's time: the clock starts anew after it.
                    if "drawing" in (phase, message.name):
                        began = time.monotonic()
                    phase, inputs = message.name, message.inputs
                    continue
                detail = f"gave no answer within {allowed:g} s while {phase}"
                self.close()
                return Measured(Outcome(Status.TIMED_OUT, detail), inputs)
        except WorkerGoneError as gone:
            self.close()
            return Measured(Outcome(Status.CRASHED, f"its process {gone} while {phase}"), inputs)

    def close(self) -> None:
        """End the worker, whatever it is doing."""
        if self._worker is None:
            return
        self._worker.kill()
        self._worker.wait()
        for stream in (self._worker.stdin, self._worker.stdout, self._log):
            if stream is not None:
                # Closing flushes; a dead reader is the reason for closing, not a new failure.
                try:
                    stream.close()
                except BrokenPipeError:
                    continue
        self._worker = None
        self._pending = b""

    def _start(self) -> None:
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(entry)) for entry in sys.path)
        self._log = tempfile.TemporaryFile()
        self._worker = subprocess.Popen(
            [sys.executable, "-m", "loka_toolkit.harness.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )
        try:
            self._send(msgspec.json.encode(self._settings))
            message = self._receive(time.monotonic() + START_SECONDS)
        except WorkerGoneError as gone:
            self.close()
            raise ReplayError(f"the process that runs candidates {gone} at its start") from None
        if isinstance(message, Ready):
            return
        self.close()
        if isinstance(message, Refused):
            raise ReplayError(message.message)
        raise ReplayError(
            f"the process that runs candidates did not start within {START_SECONDS:g} s; "
            "replay with isolate=False to see why"
        )

    def _send(self, line: bytes) -> None:
        assert self._worker is not None and self._worker.stdin is not None
        try:
            self._worker.stdin.write(line + b"\n")
            self._worker.stdin.flush()
        except BrokenPipeError:
            raise WorkerGoneError(self._obituary()) from None

    def _receive(self, deadline: float) -> Message | None:
        """Return the next message, or None if there is none before the deadline."""
        assert self._worker is not None and self._worker.stdout is not None
        descriptor = self._worker.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return None
                chunk = os.read(descriptor, 65536)
                if not chunk:
                    raise WorkerGoneError(self._obituary())
                self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return _decoder.decode(line)

    def _obituary(self) -> str:
        assert self._worker is not None and self._log is not None
        code = self._worker.wait()
        how = f"ended with code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return how + (f" ({lines[-1].strip()[:200]})" if lines else "")
