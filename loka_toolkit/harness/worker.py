"""The process in which candidates run: ``python -m loka_toolkit.harness.worker``.

A kernel can hang, exhaust memory, corrupt the GPU context or end its process. So it runs in a
process of its own, which reads requests as JSON lines from standard input and writes messages as
JSON lines to standard output; whatever libraries print goes to standard error.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import BinaryIO

import msgspec
import torch

from loka_toolkit.errors import LokaError
from loka_toolkit.harness.bench import Bench, BenchSettings
from loka_toolkit.harness.protocol import Done, Message, Phase, Ready, Refused, Request


def main() -> None:
    """Serve requests until standard input ends; the first line holds the settings."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    # An interrupt is the parent's to handle: it saves what is there and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=BenchSettings)
    torch.set_num_threads(settings.threads)
    try:
        bench = Bench(settings)
    except LokaError as error:
        _send(answers, Refused(str(error)))
        return
    _send(answers, Ready(len(bench.plan.workloads)))
    by_name = {candidate.name: candidate for candidate in bench.candidates}
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=Request)
        signal.alarm(request.self_destruct_seconds)
        measured = bench.measure(
            bench.plan.workloads[request.workload],
            by_name[request.candidate],
            lambda phase, inputs: _send(answers, Phase(phase, inputs)),
        )
        signal.alarm(0)
        _send(answers, Done(measured))
        if measured.unusable is not None:
            return


def _send(answers: BinaryIO, message: Message) -> None:
    answers.write(msgspec.json.encode(message) + b"\n")


if __name__ == "__main__":
    main()
