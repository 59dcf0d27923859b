"""Checks predicted impact against what it stands for: a directional derivative of the loss.

For every forward site and recipe the emulated error is added, t times, to the site's output in a
float64 copy of the model, and the loss differenced centrally. Costs two forward passes per site and
recipe, so it is for some steps of one's choice and not for all.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.errors import ConfigurationError
from loka_toolkit.numerics.recipes import DEFAULT_RECIPE_NAMES, Scaling, parse_recipe
from loka_toolkit.recording.composites import Composite
from loka_toolkit.recording.interception import Interception
from loka_toolkit.recording.layers import Layer, StepRecord
from loka_toolkit.recording.loss import BackwardWatch, CapturedLoss, capture
from loka_toolkit.recording.memory import StaticAmax
from loka_toolkit.recording.modules import ModelNames
from loka_toolkit.recording.observer import Observer
from loka_toolkit.recording.rows import forward_impacts
from loka_toolkit.recording.settings import RecorderSettings
from loka_toolkit.recording.units import LossUnits, StepFacts, resolve_units, understand_step
from loka_toolkit.recording.work import tensors_of, work_of

LossClosure = Callable[..., torch.Tensor]

DYNAMIC_RECIPE_NAMES = tuple(
    name for name in DEFAULT_RECIPE_NAMES if parse_recipe(name).scaling is not Scaling.STATIC
)
"""The default recipes whose scales need no earlier step."""

_LARGEST_DEVIATION = 0.10
"""Predicted and measured derivative may differ by this share of the measured one ..."""
_NOISE_FACTOR = 3.0
"""... wherever the effect exceeds this many times its noise."""


@dataclasses.dataclass(frozen=True)
class ImpactCheck:
    """One forward site under one recipe.

    Attributes:
        site: Site name.
        recipe: Recipe name.
        predicted: First-order impact as recorded, in units of the mean loss; None if unknown.
        measured: Central difference in float64, same units; None where nothing was predicted.
        noise: How far two step widths and the sampling leave it undetermined.
        status: The impact's status.
        reason: Why it is not ``ok``.
    """

    site: str
    recipe: str
    predicted: float | None
    measured: float | None
    noise: float
    status: str
    reason: str | None

    def __str__(self) -> str:
        """Say what was predicted and what measured."""
        predicted, measured = (
            "nothing" if value is None else f"{value:.3g}"
            for value in (self.predicted, self.measured)
        )
        return (
            f"impact of {self.site} under {self.recipe}: predicted {predicted}, measured {measured}"
        )

    @property
    def is_resolved(self) -> bool:
        """Whether the effect exceeds three times its noise."""
        return self.measured is not None and abs(self.measured) > _NOISE_FACTOR * self.noise

    @property
    def deviation(self) -> float | None:
        """Relative deviation of the prediction; None where the effect is not resolved."""
        if not self.is_resolved or self.predicted is None or not self.measured:
            return None
        return abs(self.predicted / self.measured - 1)

    @property
    def agrees(self) -> bool:
        """Whether the prediction lies within 10 % wherever the effect is resolved."""
        return self.deviation is None or self.deviation <= _LARGEST_DEVIATION


def verify_impact(
    model: nn.Module,
    loss_closure: LossClosure,
    inputs: Sequence[torch.Tensor],
    *,
    recipes: Sequence[str] = DYNAMIC_RECIPE_NAMES,
    width: float = 1e-3,
    examples: int | torch.Tensor | None = None,
    loss_scale: float | None = None,
    reduction: str | None = None,
) -> list[ImpactCheck]:
    """Compare predicted first-order impact with a central difference, on copies of the model.

    The model itself, its gradients and the random state are left as they are. Dropout is switched
    off in the copies.

    Args:
        model: The model, not wrapped by torch.compile.
        loss_closure: Called as ``loss_closure(model, *inputs)``; returns the scalar that training
            differentiates. It must use the model and the tensors that it is given.
        inputs: Tensors; floating ones are cast to float64 for the difference.
        recipes: Names of the recipes, none of them static: there are no earlier steps.
        width: Step t of the central difference, in units of the emulated error.
        examples: As for :meth:`Recorder.step`.
        loss_scale: As for :meth:`Recorder.step`.
        reduction: As for :meth:`Recorder.step`.

    Raises:
        UnknownNameError: If a recipe does not exist.
        ConfigurationError: If a recipe is static, ``width`` is not positive, or the model in
            float64 multiplies something else than in its own precision.
    """
    for name in recipes:
        if parse_recipe(name).has_static_scale:
            raise ConfigurationError(
                f"{name} needs the amax of earlier steps; verify a tensorwise recipe instead"
            )
    if not (math.isfinite(width) and width > 0):
        raise ConfigurationError(f"width = {width!r} must be a positive number")

    def reject(message: str) -> None:
        raise ConfigurationError(message)

    said = understand_step(None, examples, loss_scale, reduction, reject)
    with _same_random_state():
        record, units = _one_step(model, loss_closure, inputs, tuple(recipes), said)
        double = _without_dropout(copy.deepcopy(model).double())
        wide = [x.detach().double() if x.is_floating_point() else x for x in inputs]
        mean_loss = _mean_loss(record.loss, units)
        checks = []
        for index, layer in enumerate(record.layers):
            impacts = forward_impacts(record, layer, units)
            for error in layer.forward_errors.errors if layer.forward_errors else ():
                impact = impacts[error.recipe.name]
                measured, noise = None, 0.0
                if impact.first_order is not None and units.divisor is not None:
                    direction = _as_aten(layer, error.error.double())

                    def loss(t: float, at: int = index, e: torch.Tensor = direction) -> float:
                        with _Injection(at, e, t) as injection:
                            total = loss_closure(double, *wide)
                        injection.check()
                        return mean_loss(total)

                    slopes = [(loss(t) - loss(-t)) / (2 * t) for t in (width, width / 4)]
                    measured = slopes[0]
                    noise = max(abs(slopes[0] - slopes[1]), impact.standard_error or 0.0)
                checks.append(
                    ImpactCheck(
                        site=str(layer.site(Role.FWD)),
                        recipe=error.recipe.name,
                        predicted=impact.first_order,
                        measured=measured,
                        noise=noise,
                        status=impact.status,
                        reason=impact.reason,
                    )
                )
        return checks


def _one_step(
    model: nn.Module,
    loss_closure: LossClosure,
    inputs: Sequence[torch.Tensor],
    recipes: tuple[str, ...],
    said: StepFacts,
) -> tuple[StepRecord, LossUnits]:
    """Record one forward and backward of a copy, with every row of every output."""
    twin = _without_dropout(copy.deepcopy(model))
    everything = 1 << 62
    settings = RecorderSettings.validated(
        ".",
        schedule=None,
        recipes=recipes,
        include=(),
        exclude=(),
        rank=0,
        world_size=1,
        max_rows=everything,
        max_columns=everything,
        headroom=1.0,
        moments_width=0,
        seed=0,
        force=False,
        upstream_cells=0,
    )
    names = ModelNames.of(twin)
    observer = Observer(settings, StaticAmax(), names.types, exhaustive=everything)
    record = StepRecord(step=0)

    def fail(error: Exception) -> None:
        raise error

    interception = Interception(
        twin,
        names,
        observer,
        record,
        said_examples=said.example_count,
        said_loss_scale=said.loss_scale,
        report=fail,
    )
    watch = BackwardWatch(interception.on_loss, fail)
    watch.install()
    interception.install()
    try:
        loss_closure(twin, *inputs).backward()  # type: ignore[no-untyped-call]
    finally:
        interception.remove()
        watch.remove()
    return record, resolve_units(said, record.loss, lambda _: None)


def _mean_loss(seen: CapturedLoss | None, units: LossUnits) -> Callable[[torch.Tensor], float]:
    """Return a function from a loss to its mean per example.

    Where the graph shows the terms of the loss they are averaged anew, so that a wrong reduction or
    loss scale is noticed; elsewhere the loss is divided by what the prediction was divided by.
    """

    def from_terms(total: torch.Tensor) -> float:
        captured = capture(total, lambda _: None)
        captured.release()
        if captured.data_loss is None:
            raise ConfigurationError("the loss is another one in float64; it cannot be verified")
        return captured.data_loss

    def from_total(total: torch.Tensor) -> float:
        return float(total.detach()) / (units.divisor or 1.0)

    if seen is None or seen.data_loss is None or seen.terms != seen.examples:
        return from_total
    weights = seen.weights
    is_weighted = weights is not None and not bool((weights == 1).all())
    return from_total if is_weighted or seen.uniform_multiplier is None else from_terms


def _as_aten(layer: Layer, error: torch.Tensor) -> torch.Tensor:
    """Return an error of the canonical output as aten's output has it."""
    if layer.geometry is not None:
        return layer.geometry.as_output(error)
    shaped = error.reshape(layer.products, layer.rows, -1) * layer.alpha
    if not layer.forward.is_batched:
        shaped = shaped.squeeze(0)
    return shaped.mT if layer.forward.parameter_side == "a" else shaped


class _Injection(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds t times an error to the output of the product of a given number."""

    def __init__(self, index: int, error: torch.Tensor, t: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._index, self._error, self._t = index, error, t
        self._seen = 0
        self._was_added = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator; change its output if it is the one."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        work = work_of(func, args, kwargs, out)
        if work is None or isinstance(work, Composite) or work.unjudged is not None:
            return out
        if tensors_of(work).is_empty:
            return out
        if self._seen == self._index and out.numel() == self._error.numel():
            out = out + self._t * self._error.reshape(out.shape)
            self._was_added = True
        self._seen += 1
        return out

    def check(self) -> None:
        """Make sure that the error was added.

        Raises:
            ConfigurationError: If it was not.
        """
        if not self._was_added:
            raise ConfigurationError(
                f"in float64 the model has no product {self._index} with an output of shape "
                f"{tuple(self._error.shape)}; its impact cannot be verified"
            )


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    return model


@contextmanager
def _same_random_state() -> Iterator[None]:
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
