"""Records a training run: what is multiplied, its statistics, and what FP8 would do to it."""

from loka_toolkit.recording.recorder import Recorder, record
from loka_toolkit.recording.schedule import Schedule

__all__ = ["Recorder", "Schedule", "record"]
