"""Replay: the traced GEMMs through candidate kernels, on inputs drawn from recorded moments."""

from loka_toolkit.harness.ceiling import Ceiling
from loka_toolkit.harness.estimate import Estimate, Forecast, estimate
from loka_toolkit.harness.run import replay
from loka_toolkit.harness.timing import POLICIES, Method, TimingPolicy

__all__ = [
    "POLICIES",
    "Ceiling",
    "Estimate",
    "Forecast",
    "Method",
    "TimingPolicy",
    "estimate",
    "replay",
]
