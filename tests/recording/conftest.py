"""Small models, one recorded step, and an impact computed without the recorder."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.numerics.emulation import emulate
from loka_toolkit.numerics.recipes import parse_recipe
from loka_toolkit.recording import Schedule, record


class Run:
    """A closed trace as pandas frames."""

    def __init__(self, path: Path) -> None:
        self.trace = Trace.open(path)
        self.events = {e.kind: e for m in self.trace.manifests for e in m.events}
        self.sites = self._frame("sites")
        self.steps = self._frame("steps")
        self.operands = self._frame("operands")
        self.errors = self._frame("errors")
        self.moments = self._frame("moments")

    def _frame(self, table: str) -> pd.DataFrame:
        return getattr(self.trace, table).to_pandas()

    def error(self, site: str, recipe: str = "e4m3/tensorwise/fast", step: int = 0) -> Any:
        found = self.errors.query("site == @site and recipe == @recipe and step == @step")
        assert len(found) == 1, f"{len(found)} rows for {site}, {recipe}, step {step}"
        return found.iloc[0]

    def site_names(self, role: str | None = None) -> list[str]:
        chosen = self.sites if role is None else self.sites[self.sites.role == role]
        return list(dict.fromkeys(chosen.site))


@pytest.fixture
def record_run(tmp_path: Path) -> Callable[..., Run]:
    """Return a function that trains for some steps under a recorder and opens the trace."""

    def run(
        model: nn.Module,
        loss_of: Callable[[int], torch.Tensor],
        *,
        steps: int = 1,
        said: dict[str, Any] | None = None,
        learning_rate: float = 0.0,
        name: str = "run",
        **options: Any,
    ) -> Run:
        options.setdefault("schedule", Schedule.always())
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
        with record(model, tmp_path / name, **options) as recorder:
            for step in range(steps):
                optimizer.zero_grad()
                loss_of(step).backward()
                optimizer.step()
                recorder.step(**(said or {}))
        return Run(tmp_path / name)

    return run


@pytest.fixture
def linear_effect() -> Callable[..., float]:
    """Return the measured derivative of the mean loss along an nn.Linear's emulated error.

    Independent of the recorder: the error comes from the operands that a hook sees, the derivative
    from a central difference in float64 of a deep copy.
    """

    def effect(
        model: nn.Module,
        layer: str,
        inputs: tuple[torch.Tensor, ...],
        mean_loss: Callable[..., torch.Tensor],
        recipe: str = "e4m3/tensorwise/fast",
        *,
        step: float = 1e-3,
        whole: bool = False,
    ) -> float:
        linear = model.get_submodule(layer)
        seen: list[torch.Tensor] = []
        handle = linear.register_forward_hook(lambda _m, args, _o: seen.append(args[0].detach()))
        with torch.no_grad():
            mean_loss(model, *inputs)
        handle.remove()
        x, w = seen[0].reshape(-1, seen[0].shape[-1]), linear.weight.detach()
        exact = x.double() @ w.double().T
        error = emulate(x, w.T, parse_recipe(recipe)).double() - exact
        double = copy.deepcopy(model).double()
        wide = tuple(i.double() if i.is_floating_point() else i for i in inputs)

        def at(t: float) -> float:
            target = double.get_submodule(layer)
            hook = target.register_forward_hook(
                lambda _m, _a, out: out + t * error.reshape(out.shape)
            )
            with torch.no_grad():
                value = float(mean_loss(double, *wide))
            hook.remove()
            return value

        if whole:
            return at(1.0) - at(0.0)
        return (at(step) - at(-step)) / (2 * step)

    return effect
