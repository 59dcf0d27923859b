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
from torch.utils.flop_counter import flop_registry

from loka_toolkit.artifacts.sites import Role, SiteKey
from loka_toolkit.recording.layers import StepRecord
from loka_toolkit.recording.logits import read_logits
from loka_toolkit.recording.loss import CapturedLoss
from loka_toolkit.recording.modules import ModelNames, ModuleTracker
from loka_toolkit.recording.observer import Observer
from loka_toolkit.recording.operators import (
    ACTIVATIONS,
    COPIES,
    INSTALLED_TABLE,
    NORMS,
    OTHER_PRODUCTS,
    installed_flops,
    unseen_flops,
)
from loka_toolkit.recording.products import (
    ForwardOperands,
    Product,
    gradients_of_shape,
    match_gradient,
    product_of,
)
from loka_toolkit.recording.sampling import RowLayout, find_layout
from loka_toolkit.recording.storages import ParameterMap, StorageRegistry
from loka_toolkit.recording.switchboard import SWITCHBOARD
from loka_toolkit.recording.trails import ShapeTrails

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
        self._names = names
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
        self._outputs: dict[int, tuple[SiteKey, int]] = {}
        self._norms_seen: set[int] = set()
        self._norm_calls: dict[str, int] = {}
        self._forwards = 0
        self._is_in_root = False
        self._skip_reason: str | None = None
        self._saw_backward = False
        self._has_gradients = True
        self._is_looking = True
        self._sigmoid_inputs: dict[int, torch.Tensor] = {}
        self.is_enabled = True

    def install(self) -> None:
        """Place hooks and begin to intercept."""
        self._tracker.install()
        SWITCHBOARD.connect(self)

    def remove(self) -> bool:
        """Remove the hooks and stop intercepting.

        Returns:
            False if the mode still stands, below another one; try again once that one is gone.
        """
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
        loss.group(self._input_size)
        self._record.loss = loss
        if not loss.saturated_count:
            return
        logit = None
        if loss.prediction is not None:
            logit = self._sigmoid_inputs.get(self._registry.name(loss.prediction))
        self._is_looking = False
        try:
            self._record.logits_reason = read_logits(self._record, loss, logit)
        finally:
            self._is_looking = True

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
        product = product_of(func, args, kwargs, out)
        if product is not None:
            self._on_product(product, sequence)
        elif packet in OTHER_PRODUCTS or packet in flop_registry:
            self._unseen(f"operator {packet}", unseen_flops(packet, args, kwargs, out))
        elif packet in NORMS:
            result = out[0] if isinstance(out, tuple | list) else out
            self._on_norm(self._tracker.current, args[0], result, str(func))
        elif (flops := installed_flops(func, args, kwargs)) is not None:
            self._unseen(INSTALLED_TABLE, flops)
        if packet in COPIES:
            self._parameters.follow(args[0], out)
        if _backward_node() is None:
            self._trails.follow(func, args, out)
            if packet is aten.sigmoid and args[0].numel() <= _LARGEST_LOGITS:
                self._sigmoid_inputs[self._registry.name(out)] = args[0].detach().clone()
            if packet in ACTIVATIONS:
                self._pass_on_output(args[0], out)

    # Forward and backward

    def _on_product(self, product: Product, sequence: int) -> None:
        if type(product.a) not in (torch.Tensor, nn.Parameter) or type(product.b) not in (
            torch.Tensor,
            nn.Parameter,
        ):
            self._unseen("tensor subclass", product.flops)
            return
        if product.out.numel() == 0 or product.a.shape[-1] == 0:
            self._unseen("empty product", 0.0)
            return
        node = _backward_node()
        if node is None:
            self._on_forward(product, sequence)
        elif self._has_gradients and not self._is_gradient(product, int(node._sequence_nr())):
            self._on_recompute(product, sequence)
        else:
            self._saw_backward = True
            self._on_backward(product, int(node._sequence_nr()))

    def _is_gradient(self, product: Product, sequence: int) -> bool:
        """Whether a product inside of backward, with gradients on, belongs to ``create_graph``."""
        layer = self._record.by_sequence.get(sequence)
        return (
            not self._tracker.is_running
            and layer is not None
            and bool(gradients_of_shape(layer.forward, product.a.shape, product.b.shape))
        )

    def _on_forward(self, product: Product, sequence: int) -> None:
        has_node = self._has_gradients and (product.a.requires_grad or product.b.requires_grad)
        reason = self._skip_reason
        if reason is None and not self._is_in_root:
            if not self._has_gradients:
                reason = "no gradient: evaluation or optimizer"
            elif self._saw_backward:
                reason = "micro-batch: only the first forward of a step is recorded"
        if reason is not None:
            self._unseen(reason, product.flops)
            if has_node:
                self._record.skipped.setdefault(sequence, reason)
            return
        side, weight = self._parameter_of(product)
        fqn = self._tracker.module_of_product(weight)
        call = self._tracker.next_call(fqn)
        if not self._observer.settings.selects(fqn):
            self._unseen("excluded by include/exclude", product.flops)
            if has_node:
                self._record.skipped.setdefault(sequence, "excluded by include/exclude")
            return
        leading = self._leading(product, side)
        operands = ForwardOperands(
            storage_a=self._registry.name(product.a),
            storage_b=self._registry.name(product.b),
            m=product.out.shape[-2],
            n=product.out.shape[-1],
            k=product.a.shape[-1],
            parameter_side=side,
            is_batched=product.out.ndim == 3,
        )
        layout = self._layout(leading)
        layer = self._observer.forward(
            self._record,
            (fqn, call),
            product,
            operands,
            leading=leading,
            weight=weight,
            layout=layout if isinstance(layout, RowLayout) else None,
        )
        self._check_finite(product, layer.site(Role.FWD))
        if has_node:
            layer.sequence = sequence
            self._record.by_sequence.setdefault(sequence, layer)
        self._outputs[self._registry.name(product.out)] = (layer.site(Role.FWD), 0)

    def _on_recompute(self, product: Product, sequence: int) -> None:
        """Activation checkpointing runs a forward again: its backward may hang on this one."""
        self._unseen("recompute: activation checkpointing", product.flops)
        _, weight = self._parameter_of(product)
        fqn = self._tracker.module_of_product(weight)
        for layer in self._record.layers:
            forward = layer.forward
            same = (forward.m, forward.n, forward.k) == (
                product.out.shape[-2],
                product.out.shape[-1],
                product.a.shape[-1],
            )
            if layer.sequence is None and layer.fqn == fqn and same and layer.weight == weight:
                layer.sequence = sequence
                self._record.by_sequence[sequence] = layer
                return

    def _on_backward(self, product: Product, sequence: int) -> None:
        layer = self._record.by_sequence.get(sequence)
        if layer is None:
            reason = self._record.skipped.get(sequence, "backward of nothing that was recorded")
            self._unseen(reason, product.flops)
            return
        match = match_gradient(
            layer.forward,
            product.a.shape,
            product.b.shape,
            self._registry.name(product.a),
            self._registry.name(product.b),
            already_seen=layer.matched,
        )
        if match is None:
            self._unseen("backward product of another shape", product.flops)
            return
        if match.of in layer.matched:
            layer.was_passed_twice = True
            self._unseen("second backward through the same forward", product.flops)
            return
        self._observer.gradient(
            self._record,
            layer,
            product,
            match,
            layout=self._layout(layer.leading),
            loss_scale=self._loss_scale(),
        )
        layer.matched.add(match.of)
        self._check_finite(product, layer.site(Role.FWD))

    def _parameter_of(self, product: Product) -> tuple[str | None, str | None]:
        weight = self._parameters.find(product.b)
        if weight is not None:
            return "b", weight
        weight = self._parameters.find(product.a)
        return ("a", weight) if weight is not None else (None, None)

    def _leading(self, product: Product, side: str | None) -> tuple[int, ...]:
        if side == "a":
            factors = self._trails.factors(product.b)
            dimensions = (*factors[:-2], factors[-1])
        else:
            dimensions = self._trails.factors(product.a)[:-1]
        return tuple(size for dimension in dimensions for size in dimension)

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

    def _check_finite(self, product: Product, key: SiteKey) -> None:
        # An addend such as an attention mask may be infinite on purpose.
        if not product.has_addend and not bool(torch.isfinite(product.out).all()):
            self._record.nonfinite = self._record.nonfinite or f"a product of {key} is not finite"

    def _unseen(self, reason: str, flops: float) -> None:
        self._record.flops_unseen[reason] += flops

    # Modules

    def _on_root(self, begins: bool, inputs: tuple[Any, ...]) -> None:
        if _backward_node() is not None:
            return  # recomputed inside of backward
        if not begins:
            self._is_in_root = False
            self._skip_reason = None
            return
        if not self._has_gradients:
            self._skip_reason = "no gradient: evaluation or optimizer"
            return
        self._forwards += 1
        if self._forwards > 1 or self._saw_backward:
            self._skip_reason = "micro-batch: only the first forward of a step is recorded"
            return
        self._is_in_root = True
        self._tracker.reset_calls()
        self._input_size = _leading_size(inputs)

    def _on_norm(self, fqn: str, x: torch.Tensor, y: torch.Tensor, op: str | None = None) -> None:
        if _backward_node() is not None or self._skip_reason is not None:
            return
        if not self._has_gradients and not self._is_in_root:
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
    leaves = tree_leaves([vars(x) if dataclasses.is_dataclass(x) else x for x in inputs])
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
    return max(sorted(set(sizes)), key=sizes.count) if sizes else None
