"""Records a training run: what is multiplied, its statistics, and what FP8 would do to it."""

from loka_toolkit.recording.recorder import Recorder, record
from loka_toolkit.recording.schedule import Schedule
from loka_toolkit.recording.verification import ImpactCheck, verify_impact

__all__ = ["ImpactCheck", "Recorder", "Schedule", "record", "verify_impact"]
