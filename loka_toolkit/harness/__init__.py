"""Replay: the traced GEMMs through candidate kernels, on inputs drawn from recorded moments."""

from loka_toolkit.harness.estimate import Estimate, estimate
from loka_toolkit.harness.run import replay
from loka_toolkit.harness.timing import POLICIES, Method, TimingPolicy

__all__ = [
    "POLICIES",
    "Estimate",
    "Method",
    "TimingPolicy",
    "estimate",
    "replay",
]
