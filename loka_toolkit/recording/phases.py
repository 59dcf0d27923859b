"""Which part of a step is running: the forward that is judged, a further one, or evaluation."""

from __future__ import annotations

import dataclasses

EVALUATION = "no gradient: evaluation or optimizer"
MICRO_BATCH = "micro-batch"
ANOTHER_FORWARD = "another forward of the model"


@dataclasses.dataclass
class Phases:
    """Follows forwards of the model through a step.

    A forward of the model is a call of it; where its parts are called one by one, or its
    ``forward`` directly, it is whatever comes before the first backward, and between two.

    Attributes:
        is_in_model: Whether a call of the model that trains is running.
        is_evaluating: Whether a call of the model without gradients is running.
        repeats: Why what runs now has run before in this step; None in the first forward.
    """

    is_in_model: bool = False
    is_evaluating: bool = False
    repeats: str | None = None
    _depth: int = 0
    _was_called: bool = False
    _saw_backward: bool = False

    def enter(self, *, trains: bool) -> bool:
        """A call of the model begins; return whether it is another forward than the last one."""
        self._depth += 1
        if self._depth > 1:
            return False
        if not trains:
            self.is_evaluating = True
            return False
        self.is_in_model = True
        is_another = self._was_called or self._saw_backward
        if is_another:
            self._begin_another()
        self._was_called = True
        return is_another

    def leave(self) -> None:
        """A call of the model ends."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self.is_in_model = self.is_evaluating = False

    def product(self) -> bool:
        """A product of a forward is seen; return whether it begins another forward."""
        if self.is_in_model or not self._saw_backward:
            return False
        self._begin_another()
        return True

    def backward(self) -> None:
        """A gradient is seen."""
        self._saw_backward = True

    def _begin_another(self) -> None:
        self.repeats = MICRO_BATCH if self._saw_backward else ANOTHER_FORWARD
        self._saw_backward = False
