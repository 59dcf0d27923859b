"""Sees every product of a recorded step at the level of aten, forward and backward."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from loka_toolkit.artifacts.sites import Role, SiteKey
from loka_toolkit.recording.attribution import Attribution, Caller
from loka_toolkit.recording.callers import Origin, is_inside_function, origin_in_backward
from loka_toolkit.recording.layers import StepRecord
from loka_toolkit.recording.logits import read_logits
from loka_toolkit.recording.loss import CapturedLoss
from loka_toolkit.recording.modules import ModelNames, ModuleTracker
from loka_toolkit.recording.observer import Observer
from loka_toolkit.recording.operators import (
    ACTIVATIONS,
    COPIES,
    NORMS,
    is_unseen_work,
    unseen_flops,
)
from loka_toolkit.recording.phases import EVALUATION, Phases
from loka_toolkit.recording.reruns import HOOK_WATCH
from loka_toolkit.recording.sampling import RowLayout, find_layout
from loka_toolkit.recording.storages import ParameterMap, StorageRegistry
from loka_toolkit.recording.switchboard import SWITCHBOARD
from loka_toolkit.recording.trails import ShapeTrails
from loka_toolkit.recording.work import Work, tensors_of, work_of

aten = torch.ops.aten

_LARGEST_LOGITS = 1 << 20
"""Inputs of sigmoids up to this size are kept for the step: one of them may be the logits."""


class Interception:
    """One recorded step, from the end of the previous one to its own end.

    Args:
        model: The model.
        names: Its names.
        observer: Judges products.
        record: What the step gathers; filled here.
        said_examples: Number of examples that the training script gave last, or None.
        said_loss_scale: Loss scale that it gave last, or None.
        report: Called with an internal failure.
    """

    def __init__(
        self,
        model: nn.Module,
        names: ModelNames,
        observer: Observer,
        record: StepRecord,
        *,
        said_examples: int | None,
        said_loss_scale: float | None,
        report: Callable[[Exception], None],
    ) -> None:
        self.model = model
        self._observer = observer
        self._record = record
        self._said_examples = said_examples
        self._said_loss_scale = said_loss_scale
        self._input_size: int | None = None
        self._report = report
        self._registry = StorageRegistry()
        self._parameters = ParameterMap(self._registry, dict(names.parameters))
        self._trails = ShapeTrails(self._registry)
        self._tracker = ModuleTracker(model, names, self._on_root, self._on_norm, self._guarded)
        self._attribution = Attribution(
            record,
            observer,
            self._tracker,
            self._registry,
            self._parameters,
            self._trails,
            layout=self._layout,
            loss_scale=self._loss_scale,
            on_output=self._on_output,
        )
        self._phases = Phases()
        self._outputs: dict[int, tuple[SiteKey, int]] = {}
        self._norms_seen: set[int] = set()
        self._norm_calls: dict[str, int] = {}
        self._has_gradients = True
        self._is_looking = True
        self._sigmoid_inputs: dict[int, torch.Tensor] = {}
        self._hooks = HOOK_WATCH.mark()
        self._is_watching = False
        self.is_enabled = True

    def install(self) -> None:
        """Place hooks and begin to intercept."""
        HOOK_WATCH.install()
        self._is_watching = True
        with HOOK_WATCH.of_our_own():
            self._tracker.install()
        SWITCHBOARD.connect(self)
        self._hooks = HOOK_WATCH.mark()

    def remove(self) -> bool:
        """Remove the hooks and stop intercepting.

        Returns:
            False if the mode still stands, below another one; try again once that one is gone.
        """
        if self._is_watching:
            self._is_watching = False
            HOOK_WATCH.remove()
        self.is_enabled = False
        self._tracker.remove()
        return SWITCHBOARD.disconnect(self)

    def look(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        sequence: int,
    ) -> None:
        """Look at an operator that has run; ``sequence`` numbers its autograd node, if any."""
        if self.is_enabled and self._is_looking:
            self._guarded(lambda: self._look(func, args, kwargs, out, sequence))

    def leave_out(self, reason: str, flops: float) -> None:
        """Count a product that belongs to no model."""
        self._unseen(reason, flops)

    def on_loss(self, loss: CapturedLoss) -> None:
        """Take note of the loss that is about to be differentiated; only the first one counts."""
        if self._record.loss is not None:
            self._record.loss.backwards += 1
            return
        start = time.perf_counter()
        self._record.no_rerun = HOOK_WATCH.since(self._hooks)
        loss.group(self._input_size)
        self._record.loss = loss
        logit = None
        if loss.prediction is not None:
            logit = self._sigmoid_inputs.get(self._registry.name(loss.prediction))
        self._is_looking = False
        try:
            if loss.saturated_count:
                self._record.logits_reason = read_logits(self._record, loss, logit)
            self._observer.follow(self.model, self._record, loss, self._layout)
        finally:
            self._is_looking = True
            self._record.seconds += time.perf_counter() - start

    def _guarded(self, look: Callable[[], None]) -> None:
        """Run our own work so that it leaves no trace in autograd, and raises nothing."""
        start = time.perf_counter()
        self._has_gradients = torch.is_grad_enabled()
        try:
            with _out_of_the_way():
                look()
        except Exception as error:
            self._report(error)
        self._record.seconds += time.perf_counter() - start

    def _look(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        sequence: int,
    ) -> None:
        packet = func.overloadpacket
        work = work_of(func, args, kwargs, out)
        if work is not None:
            self._on_work(work, sequence)
        elif is_unseen_work(func):
            self._unseen(f"operator {packet}", unseen_flops(packet, args, kwargs, out))
        elif packet in NORMS:
            result = out[0] if isinstance(out, tuple | list) else out
            self._on_norm(self._tracker.current, args[0], result, str(func))
        if packet in COPIES:
            self._parameters.follow(args[0], out)
        if _backward_node() is None:
            self._trails.follow(func, args, out)
            if packet is aten.sigmoid and args[0].numel() <= _LARGEST_LOGITS:
                self._sigmoid_inputs[self._registry.name(out)] = args[0].detach().clone()
            if packet in ACTIVATIONS:
                self._pass_on_output(args[0], out)

    def _on_work(self, work: Work, sequence: int) -> None:
        tensors = tensors_of(work)
        if not tensors.are_plain:
            self._unseen("tensor subclass", work.flops)
            return
        if tensors.is_empty:
            self._unseen("empty product", 0.0)
            return
        has_node = self._has_gradients and any(x.requires_grad for x in tensors.factors)
        caller = Caller(sequence, has_node, _backward_node())
        if caller.node is None:
            self._on_forward(work, caller)
        elif origin_in_backward() is Origin.RECOMPUTE:
            self._attribution.recompute(work, caller)
        else:
            self._phases.backward()
            self._attribution.backward(work, caller, makes_graph=self._has_gradients)

    def _on_forward(self, work: Work, caller: Caller) -> None:
        trains = self._phases.is_in_model or self._does_train()
        if self._phases.is_evaluating or not trains:
            self._attribution.leave_out(work, caller, EVALUATION)
            return
        if self._phases.product():
            self._tracker.reset_calls()
        self._attribution.forward(work, caller, self._phases.repeats)

    def _does_train(self) -> bool:
        """Whether gradients will be asked for; a custom function computes forward without any."""
        return self._has_gradients or (self.model.training and is_inside_function())

    def _on_output(self, out: torch.Tensor, site: SiteKey) -> None:
        self._outputs[self._registry.name(out)] = (site, 0)

    def _layout(self, leading: tuple[int, ...]) -> RowLayout | str:
        loss = self._record.loss
        examples = self._said_examples
        if examples is None and loss is not None:
            examples = loss.examples
        if examples is None:
            examples = self._input_size
        if examples is None:
            return "the number of examples is not known; pass step(examples=)"
        is_said = self._said_examples is not None
        return find_layout(leading, examples, assume_consecutive=is_said)

    def _loss_scale(self) -> float:
        loss = self._record.loss
        seen = loss.loss_scale if loss is not None else None
        return self._said_loss_scale or seen or 1.0

    def _unseen(self, reason: str, flops: float) -> None:
        self._record.flops_unseen[reason] += flops

    # Modules

    def _on_root(self, begins: bool, inputs: tuple[Any, ...]) -> None:
        if _backward_node() is not None or not self._is_looking:
            return  # recomputed inside of backward, or for a pass of our own
        if not begins:
            self._phases.leave()
            return
        if self._phases.enter(trains=self._does_train()):
            self._tracker.reset_calls()
        elif self._phases.is_in_model and self._phases.repeats is None:
            self._input_size = _leading_size(inputs)

    def _on_norm(self, fqn: str, x: torch.Tensor, y: torch.Tensor, op: str | None = None) -> None:
        phases = self._phases
        if not self._is_looking:
            return
        if _backward_node() is not None or phases.repeats is not None or phases.is_evaluating:
            return
        if not self._has_gradients and not phases.is_in_model:
            return
        name = self._registry.name(y)
        if name in self._norms_seen or not self._observer.settings.selects(fqn):
            return  # the module's hook reports what its operator has reported already
        self._norms_seen.add(name)
        call = self._norm_calls.get(fqn, 0)
        self._norm_calls[fqn] = call + 1
        feeding = self._outputs.get(self._registry.name(x))
        if feeding is not None:
            self._record.norm_after.setdefault(feeding[0], fqn)
        key = SiteKey(fqn=fqn, call=call, role=Role.NORM)
        self._observer.norm(self._record, key, op or "module", x, y)

    def _pass_on_output(self, source: Any, out: Any) -> None:
        if isinstance(out, tuple | list):
            out = out[0] if out else None
        if not (isinstance(source, torch.Tensor) and isinstance(out, torch.Tensor)):
            return
        known = self._outputs.get(self._registry.name(source))
        name = self._registry.name(out)
        if known is not None and known[1] < 2 and name not in self._outputs:
            self._outputs[name] = (known[0], known[1] + 1)


def _backward_node() -> Any:
    """Return the autograd node whose backward is running, or None outside of backward."""
    return torch._C._current_autograd_node()


@contextlib.contextmanager
def _out_of_the_way() -> Iterator[None]:
    """Compute without other modes, gradients or autocast."""
    with (
        _disable_current_modes(),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        contextlib.ExitStack() as stack,
    ):
        if torch.cuda.is_available():
            stack.enter_context(torch.autocast("cuda", enabled=False))
        yield


def _leading_size(inputs: tuple[Any, ...]) -> int | None:
    """Return the most common first dimension of a model's inputs, those in dataclasses included."""
    given = tree_leaves(inputs)
    leaves = tree_leaves([vars(x) if dataclasses.is_dataclass(x) else x for x in given])
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
    return max(sorted(set(sizes)), key=sizes.count) if sizes else None
