"""Gives every GEMM-like call of a step its site: by name in forward, by number in backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from loka_toolkit.artifacts.sites import Role, SiteKey
from loka_toolkit.recording.callers import innermost_module, is_inside_compiled
from loka_toolkit.recording.composites import SUMMED, Composite
from loka_toolkit.recording.convolution_calls import TOO_LARGE, ConvolutionCall
from loka_toolkit.recording.eager import is_compiler_loaded
from loka_toolkit.recording.executions import Execution, Executions
from loka_toolkit.recording.layers import Layer, StepRecord
from loka_toolkit.recording.modules import ModuleTracker
from loka_toolkit.recording.observer import Observer
from loka_toolkit.recording.products import (
    ForwardOperands,
    Product,
    SiteShape,
    forward_factors,
    gradient_factors,
    role_of,
    shape_of,
)
from loka_toolkit.recording.sampling import RowLayout
from loka_toolkit.recording.storages import ParameterMap, StorageRegistry
from loka_toolkit.recording.trails import ShapeTrails
from loka_toolkit.recording.views import view_of
from loka_toolkit.recording.work import Work

EXCLUDED = "excluded by include/exclude"
RECOMPUTE = "recompute: activation checkpointing"
RECOMPUTED_BY_HAND = "recompute: in the backward of a custom function"
SECOND_BACKWARD = "second backward through the same forward"
SECOND_ORDER = "gradient of a gradient (create_graph)"
COMPILED = "backward of a compiled graph"
NOTHING_RECORDED = "backward of nothing that was recorded"
OTHER_SHAPE = "backward product of another shape"

_COMPILED_NODE = "CompiledFunctionBackward"


@dataclasses.dataclass(frozen=True)
class Caller:
    """What autograd says of a call.

    Attributes:
        sequence: Number of the node made for it, or of the last one made.
        has_node: Whether autograd made a node for it.
        node: The node whose backward is running, or None.
    """

    sequence: int
    has_node: bool
    node: Any = None


@dataclasses.dataclass
class Attribution:
    """Names the calls of one step and has the observer judge those that can be judged.

    Attributes:
        record: What the step gathers; filled here.
        observer: Judges products.
        tracker: Knows which module is running.
        registry: Names storages.
        parameters: Finds parameters.
        trails: Knows what rows were flattened from.
        layout: Returns where the examples are among rows flattened from some sizes, or why not.
        loss_scale: Returns the loss scale, as far as it is known.
        on_output: Called with a forward's output and its site.
    """

    record: StepRecord
    observer: Observer
    tracker: ModuleTracker
    registry: StorageRegistry
    parameters: ParameterMap
    trails: ShapeTrails
    layout: Callable[[tuple[int, ...]], RowLayout | str]
    loss_scale: Callable[[], float]
    on_output: Callable[[torch.Tensor, SiteKey], None]
    _executions: Executions = dataclasses.field(default_factory=Executions)

    # Forward

    def leave_out(self, work: Work, caller: Caller, reason: str) -> None:
        """Count a forward, and the backward to come, as unseen."""
        self._unseen(reason, work.flops)
        if caller.has_node:
            self._executions.leave_out(caller.sequence, reason)

    def forward(self, work: Work, caller: Caller, repeats: str | None) -> None:
        """Record a forward.

        Args:
            work: What was computed.
            caller: What autograd says of it.
            repeats: Why it has run before in this step; None in the first forward.
        """
        if is_compiler_loaded() and not self.record.has_compiled_code:
            self.record.has_compiled_code = is_inside_compiled()
        side, weight = self._parameter_of(work)
        fqn = self._module_of(weight)
        call = self.tracker.next_call(fqn)
        if not self.observer.settings.selects(fqn):
            self.leave_out(work, caller, EXCLUDED)
            return
        key = SiteKey(fqn=fqn, call=call, role=Role.FWD)
        shape = self._shape(work, side)
        execution = self._execution(work, (fqn, call), shape, side, weight, caller)
        if repeats is not None:
            execution.repeats = repeats
            self._note_again(key, shape, weight, repeats)
        elif str(key) in self.record.site_names:
            execution.repeats = "another call under the same name"
            self._note_again(key, shape, weight, execution.repeats)
        elif (why := _unjudged(work)) is not None:
            execution.unjudged = why
            self.observer.note_site(self.record, key, shape, weight)
            self.record.flops_not_judged[why] += shape.flops
        else:
            assert not isinstance(work, Composite)
            execution.layer = self._judge(work, execution, side, caller)
        self._executions.add(execution)

    def _judge(
        self,
        work: Product | ConvolutionCall,
        execution: Execution,
        side: str | None,
        caller: Caller,
    ) -> Layer:
        assert execution.operands is not None
        leading = self._leading(work, side)
        layout = self.layout(leading)
        layer = self.observer.forward(
            self.record,
            (execution.fqn, execution.call),
            view_of(work, side),
            execution.operands,
            leading=leading,
            weight=execution.weight,
            layout=layout if isinstance(layout, RowLayout) else None,
        )
        self._check_finite(work, layer.site(Role.FWD))
        if caller.has_node:
            layer.sequence = caller.sequence
        self.on_output(work.out, layer.site(Role.FWD))
        return layer

    def recompute(self, work: Work, caller: Caller) -> None:
        """Record that activation checkpointing runs a forward again."""
        side, weight = self._parameter_of(work)
        fqn = self._module_of(weight)
        if not self.observer.settings.selects(fqn):
            self.leave_out(work, caller, EXCLUDED)
            return
        shape = self._shape(work, side)
        again = self._execution(work, (fqn, 0), shape, side, weight, caller)
        first = self._executions.recomputed(again.kind, again.factors, caller.node)
        if first is None:
            self.leave_out(work, caller, f"{RECOMPUTE}, of nothing that was recorded")
            return
        self._note_again(first.site(Role.FWD), shape, weight, RECOMPUTE, is_recomputed=True)
        again.call, again.layer = first.call, first.layer
        again.repeats, again.unjudged = first.repeats, first.unjudged
        again.matched, again.roles = first.matched, first.roles  # one backward serves both
        if caller.has_node and again.layer is not None and again.layer.sequence is None:
            again.layer.sequence = caller.sequence
        self._executions.repeat(first, again)

    # Backward

    def backward(self, work: Work, caller: Caller, *, makes_graph: bool) -> None:
        """Record a call inside of backward.

        Args:
            work: What was computed.
            caller: What autograd says of it.
            makes_graph: Whether gradients of the gradient may follow.
        """
        if makes_graph:
            self._executions.leave_out(caller.sequence, SECOND_ORDER)
        sequence = int(caller.node._sequence_nr())
        if not self._executions.at(sequence):
            is_compiled = caller.node.name() == _COMPILED_NODE
            reason = COMPILED if is_compiled else self._executions.why_left_out(sequence)
            self._unseen(reason or NOTHING_RECORDED, work.flops)
        elif isinstance(work, Product):
            self._product_gradient(work, sequence)
        elif isinstance(work, ConvolutionCall):
            self._convolution_gradients(work, sequence)
        else:
            self._composite_gradient(work, sequence)

    def _product_gradient(self, product: Product, sequence: int) -> None:
        storages = self.registry.name(product.a), self.registry.name(product.b)
        found = self._executions.of_gradient(sequence, product.a.shape, product.b.shape, storages)
        if found is None:
            again = self._executions.same_forward(sequence, storages)
            if again is None:
                self._unseen(OTHER_SHAPE, product.flops)
                return
            side, weight = self._parameter_of(product)
            shape = self._shape(product, side)
            key = again.site(Role.FWD)
            self._note_again(key, shape, weight, RECOMPUTED_BY_HAND, is_recomputed=True)
            return
        execution, match = found.execution, found.match
        assert execution.operands is not None
        factors, gradient = gradient_factors(product, execution.operands, match)
        shape = shape_of(product, factors)
        role = role_of(execution.operands, match)
        layer = self._layer_to_judge(execution, role, shape, product.unjudged)
        execution.matched.add(match.of)
        if layer is not None:
            self._judge_gradient(layer, factors, gradient, shape)
            self._check_finite(product, layer.site(Role.FWD))

    def _convolution_gradients(self, work: ConvolutionCall, sequence: int) -> None:
        execution = self._executions.at(sequence)[0]
        side = execution.operands.parameter_side if execution.operands is not None else None
        roles = (Role.DGRAD, Role.WGRAD) if side is not None else (Role.GRAD_A, Role.GRAD_B)
        for role, is_computed in zip(roles, work.gradients or (), strict=False):
            if not is_computed:
                continue
            factors = work.gradient_factors(role) if execution.layer is not None else None
            shape = work.shape_of(role)
            unjudged = TOO_LARGE if factors is None and execution.layer is not None else None
            layer = self._layer_to_judge(execution, role, shape, unjudged)
            if layer is not None and factors is not None:
                self._judge_gradient(layer, factors, work.out.detach(), shape)

    def _composite_gradient(self, work: Composite, sequence: int) -> None:
        execution = self._executions.at(sequence)[0]
        storages = tuple(self.registry.name(x) for x in work.factors)
        role = work.role_after(execution.factors, storages, execution.weight is not None)
        self._layer_to_judge(execution, role, work.shape, work.reason)

    def _layer_to_judge(
        self, execution: Execution, role: Role, shape: SiteShape, unjudged: str | None
    ) -> Layer | None:
        """Return the layer of which a gradient is to be judged; else note its execution."""
        key = execution.site(role)
        layer, weight = execution.layer, execution.weight
        if role in execution.roles:
            if layer is not None:
                layer.was_passed_twice = True
            self._note_again(key, shape, weight, SECOND_BACKWARD)
            return None
        execution.roles.add(role)
        if execution.repeats is not None:
            self._note_again(key, shape, weight, execution.repeats)
            return None
        why = unjudged or execution.unjudged
        if layer is not None and why is None:
            return layer
        self.observer.note_site(self.record, key, shape, weight)
        self.record.flops_not_judged[why or NOTHING_RECORDED] += shape.flops
        return None

    def _judge_gradient(
        self, layer: Layer, factors: Any, gradient: torch.Tensor, shape: SiteShape
    ) -> None:
        self.observer.gradient(
            self.record,
            layer,
            factors,
            gradient,
            shape,
            layout=self.layout(layer.leading),
            loss_scale=self.loss_scale(),
        )

    # What a call is

    def _execution(
        self,
        work: Work,
        name: tuple[str, int],
        shape: SiteShape,
        side: str | None,
        weight: str | None,
        caller: Caller,
    ) -> Execution:
        factors = _factors(work)
        storages = tuple(self.registry.name(x) for x in factors)
        dims, is_batched = None, shape.batch > 1
        if isinstance(work, Product):
            dims = work.out.shape[-2], work.out.shape[-1], work.a.shape[-1]
            is_batched = work.out.ndim == 3
        elif isinstance(work, ConvolutionCall):
            dims = shape.m, shape.n, shape.k
        elif work.reason == SUMMED:
            a, b = factors  # its gradients are products of a batch
            dims, is_batched = (a.shape[-2], b.shape[-1], a.shape[-1]), True
        operands = None
        if dims is not None:
            operands = ForwardOperands(storages[0], storages[1], *dims, side, is_batched)
        return Execution(
            fqn=name[0],
            call=name[1],
            op=shape.op,
            dims=shape.dims,
            weight=weight,
            operands=operands,
            factors=storages,
            layer=None,
            repeats=None,
            unjudged=None,
            sequence=caller.sequence,
            has_node=caller.has_node,
        )

    def _shape(self, work: Work, side: str | None) -> SiteShape:
        if isinstance(work, Product):
            return shape_of(work, forward_factors(work, side))
        return work.shape

    def _parameter_of(self, work: Work) -> tuple[str | None, str | None]:
        factors = _factors(work)
        if isinstance(work, Composite):
            named = [
                (self.parameters.find(x), side) for x, side in zip(factors, "ab", strict=False)
            ]
            found = ((side, name) for name, side in named if name is not None)
            return next(found, (None, None))
        weight = self.parameters.find(factors[1])
        if weight is not None:
            return "b", weight
        if isinstance(work, ConvolutionCall):
            return None, None
        weight = self.parameters.find(factors[0])
        return ("a", weight) if weight is not None else (None, None)

    def _module_of(self, weight: str | None) -> str:
        return self.tracker.module_of_product(weight, innermost_module(self.tracker.names.modules))

    def _leading(self, work: Product | ConvolutionCall, side: str | None) -> tuple[int, ...]:
        if isinstance(work, ConvolutionCall):
            return work.geometry.leading
        if side == "a":
            factors = self.trails.factors(work.b)
            dimensions = (*factors[:-2], factors[-1])
        else:
            dimensions = self.trails.factors(work.a)[:-1]
        return tuple(size for dimension in dimensions for size in dimension)

    # Counting

    def _note_again(
        self,
        key: SiteKey,
        shape: SiteShape,
        weight: str | None,
        reason: str,
        *,
        is_recomputed: bool = False,
    ) -> None:
        """Note a further execution of a site; one that never ran before is not judged."""
        is_known = str(key) in self.record.site_names
        self.observer.note_site(self.record, key, shape, weight, is_recomputed=is_recomputed)
        if is_known:
            self.record.flops_repeated[reason] += shape.flops
        else:
            self.record.flops_not_judged[f"first ran as: {reason}"] += shape.flops

    def _unseen(self, reason: str, flops: float) -> None:
        self.record.flops_unseen[reason] += flops

    def _check_finite(self, work: Product | ConvolutionCall, key: SiteKey) -> None:
        # An addend such as an attention mask may be infinite on purpose.
        has_addend = isinstance(work, Product) and work.has_addend
        if not has_addend and not bool(torch.isfinite(work.out).all()):
            self.record.nonfinite = self.record.nonfinite or f"a product of {key} is not finite"


def _factors(work: Work) -> tuple[torch.Tensor, ...]:
    if isinstance(work, Product):
        return work.a, work.b
    if isinstance(work, ConvolutionCall):
        return work.x, work.w
    return work.factors


def _unjudged(work: Work) -> str | None:
    return work.reason if isinstance(work, Composite) else work.unjudged
