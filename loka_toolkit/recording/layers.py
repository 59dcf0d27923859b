"""What one recorded step has gathered so far: layers, norms, rows to come."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import torch

from loka_toolkit.artifacts.sites import Operand, Role, SiteKey
from loka_toolkit.recording.convolution import Convolution, tokens_at
from loka_toolkit.recording.cross import CrossMoments
from loka_toolkit.recording.loss import CapturedLoss
from loka_toolkit.recording.places import Parts, Slots
from loka_toolkit.recording.products import ForwardOperands
from loka_toolkit.recording.sampling import RowLayout, SampledRows
from loka_toolkit.recording.whatif import RecipeError, ScaleBook


@dataclasses.dataclass
class GradientColumns:
    """What a gradient site says of the parameter gradient it computes.

    Attributes:
        bias: <dG,G>/<G,G> by recipe name.
        error_squares: |dG|^2 by recipe name, on the sampled output.
        gradient_squares: |G|^2 on the sampled output.
        example_squares: sum over examples of |G_b|^2 on the sampled output; None if unknown.
        layout: Where the examples were taken to be.
        reason: Why the columns are null.
    """

    bias: dict[str, float] = dataclasses.field(default_factory=dict)
    error_squares: dict[str, float] = dataclasses.field(default_factory=dict)
    gradient_squares: float = 0.0
    example_squares: float | None = None
    layout: RowLayout | None = None
    reason: str | None = None


@dataclasses.dataclass
class SiteErrors:
    """The errors of one site, as far as they are known before the step ends.

    Attributes:
        key: The site.
        errors: One per recipe.
        casts: Underflow and saturation columns by recipe name.
        sampled_rows: Output rows.
        sampled_columns: Output columns.
        gradient: Of a wgrad site.
    """

    key: SiteKey
    errors: list[RecipeError]
    casts: dict[str, dict[str, Any]]
    sampled_rows: int
    sampled_columns: int
    gradient: GradientColumns | None = None


@dataclasses.dataclass
class Layer:
    """The sites of one GEMM call, open between its forward and the end of the step.

    Attributes:
        fqn: Module.
        call: Index of the product in the module.
        forward: What backward products are matched against.
        alpha: Factor of the product in the output.
        leading: Sizes that the output's rows were flattened from.
        products: Number of products of a batch.
        rows: Output rows per product.
        sampled: Rows on which the forward error is kept.
        book: Scales and cast events of the operands.
        weight: Name of the parameter multiplied, or None.
        has_broadcast_weight: Whether one parameter serves several products of the batch.
        geometry: Of a convolution.
        slots: Which products of the batch are of one kind.
        forward_errors: Errors of the forward site; None if no recipe applies.
        gradient_rows: Gradient of the output at the sampled rows, float32 [rows, n].
        logit_rows: Derivative of the examples' logits likewise; only on steps with saturated ones.
        matched: Gradients matched so far.
        roles: Their roles.
        sequence: Autograd sequence number, or None.
        was_passed_twice: Whether a second backward went through.
    """

    fqn: str
    call: int
    forward: ForwardOperands
    alpha: float
    leading: tuple[int, ...]
    products: int
    rows: int
    sampled: SampledRows
    book: ScaleBook
    weight: str | None
    has_broadcast_weight: bool
    geometry: Convolution | None = None
    slots: Slots = dataclasses.field(default_factory=Slots)
    forward_errors: SiteErrors | None = None
    gradient_rows: torch.Tensor | None = None
    logit_rows: torch.Tensor | None = None
    matched: set[str] = dataclasses.field(default_factory=set)
    roles: set[Role] = dataclasses.field(default_factory=set)
    sequence: int | None = None
    was_passed_twice: bool = False

    def sampled_rows_of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sampled rows of a gradient of the output as aten saw it, float32 [rows, n]."""
        if self.geometry is not None:
            return tokens_at(self.geometry, gradient, self.sampled).to(torch.float32, copy=True)
        if gradient.ndim < 2:
            gradient = gradient.reshape(self.forward.m, self.forward.n)
        tokens = gradient.mT if self.forward.parameter_side == "a" else gradient
        flat = tokens.reshape(-1, tokens.shape[-1])
        rows = self.sampled.flat(self.products, self.rows).to(flat.device)
        return flat[rows].to(torch.float32, copy=True)

    @property
    def gradient_site(self) -> SiteKey:
        """The site under which the gradient of the output is recorded: the first of two."""
        order = (Role.DGRAD, Role.GRAD_A, Role.WGRAD, Role.GRAD_B)
        return self.site(next(role for role in order if role in self.roles))

    def site(self, role: Role) -> SiteKey:
        """Return the key of one of the layer's sites."""
        return SiteKey(fqn=self.fqn, call=self.call, role=role)


@dataclasses.dataclass
class OperandSample:
    """Statistics of an operand, kept until the step ends.

    Attributes:
        site: Site at which it was first multiplied.
        operand: Its name.
        statistics: Columns of the table ``operands``.
        layer: The layer that multiplied it; None for a norm.
        moments: Its moments by place; None for a norm.
    """

    site: SiteKey
    operand: Operand
    statistics: dict[str, Any]
    layer: Layer | None
    moments: Parts | None


@dataclasses.dataclass
class StepRecord:
    """Everything of one recorded step; dropped whole if the step turns out not to count.

    Attributes:
        step: Optimizer step.
        layers: Layers in order of their forward.
        site_rows: Rows of the table ``sites``.
        site_names: Names of the sites in them.
        site_errors: Errors of gradient sites.
        operands: Operand statistics.
        cross_moments: What g and x have in common, of layers with a wgrad product.
        loss: Captured loss, or None.
        no_rerun: Why the script's graph may not be run for a pass of our own; None if it may.
        upstream: What gradient sites do to the parameters upstream, where it was followed.
        upstream_reason: Why nothing was followed; None if something was.
        logits_reason: Why the logits of saturated examples could not be read; None if they were.
        norm_after: FQN of the norm that a forward site feeds.
        flops_seen: FLOPs of products recorded and judged.
        flops_not_judged: FLOPs of sites without errors, by reason.
        flops_repeated: FLOPs of further executions of sites, by reason.
        flops_unseen: FLOPs of products that no site accounts for, by reason.
        has_compiled_code: Whether a function compiled by torch.compile was run, eagerly.
        nonfinite: Why the step is not finite; None if it is.
        failures: Internal failures.
        seconds: Time spent recording.
    """

    step: int
    layers: list[Layer] = dataclasses.field(default_factory=list)
    site_rows: dict[tuple[Any, ...], dict[str, Any]] = dataclasses.field(default_factory=dict)
    site_names: set[str] = dataclasses.field(default_factory=set)
    site_errors: list[SiteErrors] = dataclasses.field(default_factory=list)
    operands: list[OperandSample] = dataclasses.field(default_factory=list)
    cross_moments: list[tuple[Layer, CrossMoments]] = dataclasses.field(default_factory=list)
    loss: CapturedLoss | None = None
    no_rerun: str | None = None
    upstream: dict[SiteKey, GradientColumns] = dataclasses.field(default_factory=dict)
    upstream_reason: str | None = None
    logits_reason: str | None = None
    norm_after: dict[SiteKey, str] = dataclasses.field(default_factory=dict)
    flops_seen: float = 0.0
    flops_not_judged: defaultdict[str, float] = dataclasses.field(
        default_factory=lambda: defaultdict(float)
    )
    flops_repeated: defaultdict[str, float] = dataclasses.field(
        default_factory=lambda: defaultdict(float)
    )
    flops_unseen: defaultdict[str, float] = dataclasses.field(
        default_factory=lambda: defaultdict(float)
    )
    has_compiled_code: bool = False
    nonfinite: str | None = None
    failures: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def saturation_note(self) -> str:
        """What becomes of examples whose log loss is saturated."""
        how = (
            "their logits were followed by a backward pass of their own"
            if self.logits_reason is None
            else f"what an error does to them is not known: {self.logits_reason}"
        )
        return f"the log loss of some examples is saturated, so its gradient vanishes; {how}"
