"""Finds the models that a script trains and tells their recorders of every optimizer step."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from loka_toolkit.errors import LokaError
from loka_toolkit.recording.events import warn_safely
from loka_toolkit.recording.lineup import (
    Lineup,
    count_other_models,
    held_by,
    line_up,
    trained_parameters,
    unused,
)
from loka_toolkit.recording.recorder import Recorder
from loka_toolkit.recording.scout import Scout
from loka_toolkit.recording.switchboard import SWITCHBOARD

FOUND_LATE = (
    "none of its modules was called before its optimizer stepped (it is compiled, scripted, or "
    "called by its forward method), so its first step was not seen"
)


class OpenRecorder(Protocol):
    """Opens the recorder of a model that was found."""

    def __call__(self, name: str, model: nn.Module, *, has_others: bool) -> Recorder | None:
        """Return an open recorder; None where the model is not to be recorded.

        Raises:
            LokaError: If it cannot be opened and the script had better stop.
        """


@dataclasses.dataclass
class FoundModel:
    """A model that the script trains, between two of its optimizer steps.

    Attributes:
        name: Its name.
        lineup: Its modules, parameters and optimizers.
        recorder: Its recorder; None where it is not recorded.
        notes: What a reader of its trace must know.
    """

    name: str
    lineup: Lineup
    recorder: Recorder | None
    notes: list[str] = dataclasses.field(default_factory=list)
    _expected: list[weakref.ref[Optimizer]] = dataclasses.field(default_factory=list)
    _stepped: set[int] = dataclasses.field(default_factory=set)
    _loss_scale: torch.Tensor | None = None
    _called: set[int] = dataclasses.field(default_factory=set)
    _only_evaluated: bool = True
    _is_void: bool = False

    def expect(self, optimizers: list[Optimizer]) -> None:
        """Take note of the optimizers that hold parameters of the model."""
        self._expected = [
            weakref.ref(one) for one in optimizers if self.lineup.parameters & set(held_by([one]))
        ]

    def is_trained_by(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds parameters of the model."""
        return any(one() is optimizer for one in self._expected)

    def begin_forward(self, module: nn.Module, *, is_trained: bool) -> None:
        """Finish the step whose optimizers have stepped; drop one whose gradients are not used.

        Args:
            module: The module that is called: the model, or a part of it.
            is_trained: Whether it is in training mode and not frozen.
        """
        if self._stepped:
            self.finish_step()
        is_repeated = id(module) in self._called
        if is_repeated and (self._is_void or (self._only_evaluated and is_trained)):
            if self.recorder is not None:
                self.recorder.restart_step()
            self._begin_anew()
        self._called.add(id(module))
        self._only_evaluated = self._only_evaluated and not is_trained

    def end_optimizer(self, optimizer: Optimizer, loss_scale: torch.Tensor | None) -> None:
        """Count a step once every optimizer of the model has stepped."""
        if id(optimizer) in self._stepped:
            self.finish_step()
        self._stepped.add(id(optimizer))
        self._loss_scale = loss_scale if loss_scale is not None else self._loss_scale
        is_round = all(one() is None or id(one()) in self._stepped for one in self._expected)
        # Optimizers may step inside of backward, parameter by parameter: not in the middle of it.
        if is_round and torch._C._current_autograd_node() is None:
            self.finish_step()

    def void(self) -> None:
        """Drop what was seen once the next forward begins, unless an optimizer steps before.

        Another model's optimizer has stepped: what went through this model went for that one. Or
        a gradient scaler found Inf or NaN.
        """
        self._is_void = bool(self._called)

    def finish_step(self) -> None:
        """Tell the recorder of a step."""
        scale = self._loss_scale
        if self.recorder is not None:
            is_needed = scale is not None and not self.recorder.knows_loss_scale
            self.recorder.step(loss_scale=float(scale) if is_needed and scale is not None else None)
        self._begin_anew()

    def close(self) -> None:
        """Count a step that is pending and close the recorder."""
        if self._stepped:
            self.finish_step()
        if self.recorder is not None:
            self.recorder.__exit__(None, None, None)

    def _begin_anew(self) -> None:
        self._stepped.clear()
        self._called.clear()
        self._loss_scale = None
        self._is_void, self._only_evaluated = False, True


class Discovery:
    """Follows a script: which models it trains, and when they step.

    Args:
        open_recorder: Opens the recorder of a model that was found.
        name_of: Names a module.
    """

    def __init__(
        self, open_recorder: OpenRecorder, name_of: Callable[[nn.Module], str | None]
    ) -> None:
        self._open_recorder = open_recorder
        self._name_of = name_of
        self._scout = Scout(self)
        self._generation: tuple[int, ...] = ()
        self._known: dict[int, tuple[weakref.ref[nn.Module], list[FoundModel], bool]] = {}
        self.models: list[FoundModel] = []
        self.failures: list[str] = []
        self.was_called = False
        self.was_called_elsewhere = False
        self.has_stepped = False

    def install(self) -> None:
        """Begin to follow what the calling thread does."""
        self._scout.install()

    def close(self) -> None:
        """Restore PyTorch and close every recorder."""
        self._scout.remove()
        with contextlib.ExitStack() as stack:
            for model in self.models:
                stack.callback(SWITCHBOARD.withdraw, model.lineup.model)
                stack.callback(model.close)

    # What the scout tells

    def is_followed(self, module: nn.Module) -> bool:
        """Whether a module is, or is to become, part of a model."""
        models, is_new = self._parts_of(module)
        return bool(models) or is_new

    def begin_forward(self, module: nn.Module) -> None:
        """Find the model of a module, if that is new, and tell it that a forward begins."""
        self._safely(lambda: self._begin_forward(module))

    def end_step(self, optimizer: Optimizer, loss_scale: torch.Tensor | None) -> None:
        """Count the step of an optimizer for the models it trains."""
        self._safely(lambda: self._end_step(optimizer, loss_scale))

    def skip_step(self, optimizer: Optimizer) -> None:
        """Void the step of the models that an optimizer trains."""
        for model in self.models:
            if model.is_trained_by(optimizer):
                model.void()

    def note_other_thread(self) -> None:
        """Remember why nothing may have been found."""
        self.was_called_elsewhere = True

    # Finding

    def _begin_forward(self, module: nn.Module) -> None:
        models, is_new = self._parts_of(module)
        # A critic may be frozen while its generator is trained: that is no forward of its own.
        is_trained = bool(trained_parameters(module))
        if is_new and is_trained:
            self._find(module)
            models, is_new = self._parts_of(module)
            if is_new:  # what is left of it belongs to no module: do not search every time
                self._known[id(module)] = (weakref.ref(module), models, False)
        for model in models:
            model.begin_forward(module, is_trained=is_trained and module.training)

    def _end_step(self, optimizer: Optimizer, loss_scale: torch.Tensor | None) -> None:
        self._refresh()
        if not any(p.grad is not None for g in optimizer.param_groups for p in g["params"]):
            return  # a step without gradients changes nothing
        self.has_stepped = True
        if not any(model.is_trained_by(optimizer) for model in self.models):
            found = self._find(optimizer)
            if found is not None:
                found.notes.append(FOUND_LATE)
            return
        for model in self.models:
            if model.is_trained_by(optimizer):
                model.end_optimizer(optimizer, loss_scale)
            else:
                model.void()

    def _find(self, start: nn.Module | Optimizer) -> FoundModel | None:
        optimizers = list(self._scout.optimizers())
        taken = {p for model in self.models for p in model.lineup.parameters}
        lineup = line_up(start, optimizers, taken, self._label)
        if lineup is None:
            return None
        has_others = bool(self.models) or count_other_models(lineup, optimizers) > 0
        name = unused(self._label(lineup.model), (model.name for model in self.models))
        recorder = self._open_recorder(name, lineup.model, has_others=has_others)
        found = FoundModel(name, lineup, recorder)
        found.expect(optimizers)
        SWITCHBOARD.announce(lineup.model)
        self.models.append(found)
        return found

    def _label(self, module: nn.Module) -> str:
        return self._name_of(module) or type(module).__name__

    def _parts_of(self, module: nn.Module) -> tuple[list[FoundModel], bool]:
        """Return the models that a module is part of, and whether it seems to be of a new one."""
        self._refresh()
        known = self._known.get(id(module))
        if known is not None and known[0]() is module:
            return known[1], known[2]
        mine = {id(parameter) for parameter in module.parameters()}  # frozen ones may thaw
        models = [model for model in self.models if model.lineup.parameters & mine]
        taken = {p for model in models for p in model.lineup.parameters}
        is_new = bool((mine - taken) & set(held_by(self._scout.optimizers())))
        self.was_called = self.was_called or bool(mine)
        self._known[id(module)] = (weakref.ref(module), models, is_new)
        return models, is_new

    def _refresh(self) -> None:
        """Forget what was concluded before there were other optimizers, parameters or models."""
        optimizers = list(self._scout.optimizers())
        groups = [len(optimizer.param_groups) for optimizer in optimizers]
        generation = (len(self.models), *map(id, optimizers), *groups)
        if generation != self._generation:
            self._generation = generation
            self._known.clear()
            for model in self.models:
                model.expect(optimizers)

    def _safely(self, action: Callable[[], Any]) -> None:
        """Let only what the user must know at once pass into the script."""
        try:
            action()
        except LokaError:
            raise
        except Exception as failure:
            message = f"{type(failure).__name__}: {failure}".splitlines()[0]
            if message not in self.failures:
                self.failures.append(message)
                warn_safely(f"loka record: {message}")
