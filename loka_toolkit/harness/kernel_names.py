"""Which kernel actually ran: libraries fall back inside, and then the wrong thing is timed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loka_toolkit.harness.trial import Trial, prepare
from loka_toolkit.kernels.contract import Candidate

_MOST_NAMES = 4
_VIEWS = frozenset(
    "view _unsafe_view slice transpose t select unsqueeze squeeze expand detach alias".split()
)


def kernels_run(candidate: Candidate, trial: Trial, device: torch.device) -> str | None:
    """Return the names of what the product launched, casts left out, in the order of launch.

    On a GPU these are kernels as the CUDA profiler sees them; elsewhere the ATen operators. None
    where nothing could be seen.
    """
    prepared = prepare(candidate, trial)

    def run() -> None:
        candidate.run(*prepared, trial.out_dtype)

    names = _cuda_kernels(run, device) if device.type == "cuda" else _aten_operators(run)
    shown = list(dict.fromkeys(names))
    more = f" + {len(shown) - _MOST_NAMES} more" if len(shown) > _MOST_NAMES else ""
    return " + ".join(shown[:_MOST_NAMES]) + more if shown else None


def _cuda_kernels(run: Any, device: torch.device) -> list[str]:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize(device)
    on_device = [event for event in profile.events() or [] if event.device_type.name == "CUDA"]
    on_device.sort(key=lambda event: event.time_range.start)
    return [event.name for event in on_device]


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.split(".")[1] not in _VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def _aten_operators(run: Any) -> list[str]:
    mode = _Operators()
    with mode:
        run()
    return mode.names
