"""The device side of an installation: counters, static scales, the loss scale.

They live outside the model: as buffers they would be cast with it (a float32 scale to bfloat16),
broadcast by DistributedDataParallel (one rank's counts over all others') and seen by code that
copies buffers. Each exists once per device, made when first needed.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from loka_toolkit.artifacts.dispatch_table import MissReason
from loka_toolkit.kernels.contract import Candidate, Side


class Outcome(enum.IntEnum):
    """What became of one product at run time; the value is its column among the counters.

    ``ENV``: operands on another kind of device. ``SHAPE``: a token count outside the entry's
    interval or no multiple of what the kernel takes. ``LAYOUT``: operands that are not laid out in
    memory as the entry says, which at run time is their dtype: one other than the entry's.
    """

    HIT = 0
    ENV = 1
    SHAPE = 2
    LAYOUT = 3

    @property
    def reason(self) -> MissReason | None:
        """The reason of a miss; None for a hit."""
        return None if self is Outcome.HIT else MissReason[self.name]


@dataclasses.dataclass(frozen=True)
class Slot:
    """What the runtime keeps of one entry.

    Attributes:
        candidate: The kernel.
        scale_a: Static decode scale of A, or None.
        scale_b: Static decode scale of B, or None.
        gradient: The factor that is a gradient, whose static scale is per unit of loss scale, or
            None in forward.
    """

    candidate: Candidate
    scale_a: float | None
    scale_b: float | None
    gradient: Side | None = None


@dataclasses.dataclass(frozen=True)
class DeviceState:
    """An installation's tensors on one device.

    Attributes:
        counts: int64 [rows, outcomes]: a row per slot, then one per routed module for products of
            which the table does not know.
        loss_scale: float32 scalar.
        scale_a: float32 scalar per slot, or None.
        scale_b: float32 scalar per slot, or None.
    """

    counts: Tensor
    loss_scale: Tensor
    scale_a: tuple[Tensor | None, ...]
    scale_b: tuple[Tensor | None, ...]


_IDS = itertools.count(1)
_BANKS: weakref.WeakValueDictionary[int, Bank] = weakref.WeakValueDictionary()


class Bank:
    """Counters and scales of one installation.

    Custom ops can carry numbers but no Python objects, so they name their bank by ``id``.
    """

    def __init__(self, slots: Sequence[Slot], device: torch.device, more_rows: int = 0) -> None:
        self.slots = tuple(slots)
        self.rows = len(self.slots) + more_rows
        self.id = next(_IDS)
        self._states: dict[torch.device, DeviceState] = {}
        self.on(device)
        _BANKS[self.id] = self

    def __deepcopy__(self, memo: dict[int, object]) -> Bank:
        """Return self: a copy of an installed model counts into the same installation."""
        return self

    def on(self, device: torch.device) -> DeviceState:
        """Return the tensors on ``device``, made now if the model was moved there."""
        if device not in self._states:
            others = list(self._states.values())
            self._states[device] = _new_state(self.slots, self.rows, device)
            if others:
                self._states[device].loss_scale.copy_(others[0].loss_scale)
        return self._states[device]

    def count(self, device: torch.device, row: int, outcome: int) -> None:
        """Add one to a counter, on the device and without a synchronization."""
        self.on(device).counts[row, outcome].add_(1)

    def anywhere(self) -> DeviceState:
        """Return the tensors on the device where the model was when the table was installed."""
        return next(iter(self._states.values()))

    def set_loss_scale(self, scale: float | Tensor) -> None:
        """Set the loss scale on every device, without a synchronization if it is a tensor."""
        for state in self._states.values():
            if isinstance(scale, Tensor):
                state.loss_scale.copy_(scale.reshape(()), non_blocking=True)
            else:
                state.loss_scale.fill_(scale)

    def totals(self) -> list[list[int]]:
        """Return the counts, [rows][outcomes], over all devices; this synchronizes."""
        total = torch.zeros(self.rows, len(Outcome), dtype=torch.int64)
        for state in self._states.values():
            total += state.counts.cpu()
        rows: list[list[int]] = total.tolist()
        return rows


def bank(bank_id: int) -> Bank:
    """Return the bank of that id.

    Raises:
        RuntimeError: If its installation no longer exists.
    """
    found = _BANKS.get(bank_id)
    if found is None:
        raise RuntimeError(
            "a compiled graph refers to an installation that is gone; compile the model again"
        )
    return found


def _new_state(slots: Sequence[Slot], rows: int, device: torch.device) -> DeviceState:
    def scalar(value: float | None) -> Tensor | None:
        if value is None:
            return None
        return torch.tensor(value, dtype=torch.float32, device=device)

    with torch.inference_mode(False):
        return DeviceState(
            counts=torch.zeros(rows, len(Outcome), dtype=torch.int64, device=device),
            loss_scale=torch.ones((), dtype=torch.float32, device=device),
            scale_a=tuple(scalar(slot.scale_a) for slot in slots),
            scale_b=tuple(scalar(slot.scale_b) for slot in slots),
        )
