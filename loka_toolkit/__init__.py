"""Find out, from your own training run, where FP8 is safe and where it pays.

The whole road, in the order in which it is walked::

    import loka_toolkit as loka

    with loka.record(model, "run") as recorder:        # 1. record a trace while training
        for batch in loader:
            loss = train_step(model, batch)
            recorder.step(loss=loss, examples=len(batch))

    safety = loka.analyze("run")                       # 2. where is FP8 safe?
    safety.save("safety.parquet")
    loka.write_report("report.html", safety, trace="run")

    results = loka.replay("run", "replay.parquet")     # 3. which kernels are right, and how fast?
    table = loka.build_table(safety, results)          # 4. what runs where
    table.save("table.json")

    loka.install(model, "table.json")                  # 5. train on, in FP8 where it is safe

Every name is loaded on first use: recording and dispatching need no analysis packages.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from loka_toolkit._version import __version__

if TYPE_CHECKING:
    from loka_toolkit.analysis import analyze
    from loka_toolkit.artifacts.dispatch_table import DispatchTable
    from loka_toolkit.artifacts.replay_results import ReplayResults
    from loka_toolkit.artifacts.safety_map import SafetyMap
    from loka_toolkit.artifacts.trace import Trace
    from loka_toolkit.dispatch import build_table, check_table, install, uninstall
    from loka_toolkit.errors import LokaError
    from loka_toolkit.harness import estimate, replay
    from loka_toolkit.numerics.tolerance import Tolerance
    from loka_toolkit.recording import Recorder, Schedule, record
    from loka_toolkit.reporting import report, write_report

_HOMES = {
    "record": "recording",
    "Recorder": "recording",
    "Schedule": "recording",
    "analyze": "analysis",
    "report": "reporting",
    "write_report": "reporting",
    "replay": "harness",
    "estimate": "harness",
    "build_table": "dispatch",
    "check_table": "dispatch",
    "install": "dispatch",
    "uninstall": "dispatch",
    "Tolerance": "numerics.tolerance",
    "Trace": "artifacts.trace",
    "SafetyMap": "artifacts.safety_map",
    "ReplayResults": "artifacts.replay_results",
    "DispatchTable": "artifacts.dispatch_table",
    "LokaError": "errors",
}

__all__ = [
    "DispatchTable",
    "LokaError",
    "Recorder",
    "ReplayResults",
    "SafetyMap",
    "Schedule",
    "Tolerance",
    "Trace",
    "__version__",
    "analyze",
    "build_table",
    "check_table",
    "estimate",
    "install",
    "record",
    "replay",
    "report",
    "uninstall",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"loka_toolkit.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'loka_toolkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
