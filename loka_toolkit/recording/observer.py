"""Judges intercepted products: statistics, moments, what-if errors, all at once and by value."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from loka_toolkit.artifacts.sites import Operand, Role, SiteKey
from loka_toolkit.recording.cross import CrossMoments
from loka_toolkit.recording.gradients import example_gradient_squares, gradient_columns
from loka_toolkit.recording.layers import Layer, OperandSample, SiteErrors, StepRecord
from loka_toolkit.recording.loss import MIXED, CapturedLoss
from loka_toolkit.recording.memory import StaticAmax
from loka_toolkit.recording.places import Slots, joint_parts, operand_parts
from loka_toolkit.recording.products import (
    Factors,
    ForwardOperands,
    SiteShape,
    dtype_name,
    layout_of,
)
from loka_toolkit.recording.samples import Sample
from loka_toolkit.recording.sampling import RowLayout, Sampler
from loka_toolkit.recording.scalebook import ScaleBook, contraction_axes
from loka_toolkit.recording.settings import RecorderSettings
from loka_toolkit.recording.statistics import operand_statistics
from loka_toolkit.recording.upstream import Follower, LayoutOf
from loka_toolkit.recording.views import ForwardView
from loka_toolkit.recording.whatif import EXHAUSTIVE_PRODUCTS, PROBE_PRODUCTS, recipe_errors
from loka_toolkit.recording.whole import WholeSample


@dataclasses.dataclass
class Observer:
    """Turns products into rows; everything it keeps is a copy.

    Attributes:
        settings: The recorder's settings.
        static: Amax of earlier sampled steps.
        module_types: Class name by module path.
        exhaustive: Products up to which a forward site's accumulator is emulated everywhere.
    """

    settings: RecorderSettings
    static: StaticAmax
    module_types: dict[str, str]
    exhaustive: int = EXHAUSTIVE_PRODUCTS

    def __post_init__(self) -> None:
        """Make the sampler."""
        settings = self.settings
        self._sampler = Sampler(settings.seed, settings.max_rows, settings.max_columns)
        self._follower = Follower(settings.upstream_cells)

    def forward(
        self,
        record: StepRecord,
        layer_name: tuple[str, int],
        view: ForwardView,
        operands: ForwardOperands,
        *,
        leading: tuple[int, ...],
        weight: str | None,
        layout: RowLayout | None,
    ) -> Layer:
        """Record a forward product and return its layer, open for its backward."""
        fqn, call = layer_name
        shape = view.shape
        key = SiteKey(fqn=fqn, call=call, role=Role.FWD)
        sampled = self._sampler.forward(
            shape.batch, shape.m, shape.n, layout, record.step, str(key)
        )
        if view.most_rows is not None:
            if len(sampled.flat(shape.batch, shape.m)) > view.most_rows:
                limit = min(view.most_rows, self.settings.max_rows)
                sampled = self._sampler.rows(shape.batch, shape.m, limit, record.step, str(key))
        factors, place = view.factors(sampled)
        weight_tensor = factors.b if weight is not None else None
        layer = Layer(
            fqn=fqn,
            call=call,
            forward=operands,
            alpha=view.alpha,
            leading=leading,
            products=shape.batch,
            rows=shape.m,
            sampled=sampled,
            book=ScaleBook(self.static.of_layer(key.layer), self.settings.headroom),
            weight=weight,
            slots=_slots(record, fqn, factors, Slots.of(shape.batch, shape.m, layout, leading)),
            has_broadcast_weight=weight_tensor is not None
            and weight_tensor.ndim == 3
            and weight_tensor.shape[0] > 1
            and weight_tensor.stride(0) == 0,
            geometry=view.geometry,
        )
        self.note_site(record, key, shape, weight)
        self._note_operands(record, layer, key, factors, (True, True))
        self._note_joint(record, layer, factors)
        sample = Sample.of(factors, rows=place.rows, columns=None, batch=place.batch)
        layer.forward_errors = self._errors(
            record.step, key, layer, factors, sample, self.exhaustive, shape.n
        )
        record.layers.append(layer)
        record.flops_seen += shape.flops
        return layer

    def gradient(
        self,
        record: StepRecord,
        layer: Layer,
        factors: Factors,
        gradient: torch.Tensor,
        shape: SiteShape,
        *,
        layout: RowLayout | str,
        loss_scale: float,
    ) -> None:
        """Record a backward product of a layer; ``gradient`` is that of its output."""
        layer.book.loss_scale = loss_scale
        key = layer.site(factors.role)
        if layer.gradient_rows is None:
            layer.gradient_rows = layer.sampled_rows_of(gradient)
        is_first = not layer.roles
        layer.roles.add(factors.role)
        left_is_g = factors.operands[0] is Operand.G
        self.note_site(record, key, shape, layer.weight)
        wanted = (is_first and left_is_g, is_first and not left_is_g)
        self._note_operands(record, layer, key, factors, wanted)
        m, n, _ = factors.dims
        sampled, columns = self._sampler.gradient(factors.batch, m, n, record.step, str(key))
        sample = Sample.of(factors, rows=sampled.rows, columns=columns, batch=sampled.batch)
        taken = len(columns) if columns is not None else n
        errors = self._errors(record.step, key, layer, factors, sample, PROBE_PRODUCTS, taken)
        if factors.role is Role.WGRAD:
            if factors.a.ndim == 2 and record.nonfinite is None:
                cross = CrossMoments.of(factors.left, factors.right)
                if cross is not None:
                    record.cross_moments.append((layer, cross))
            errors.gradient = gradient_columns(sample, errors.errors)
            if layer.has_broadcast_weight:
                errors.gradient.reason = (
                    "the parameter serves several products of a batch, whose gradients are added "
                    "later"
                )
            else:
                is_mixed = record.loss is not None and layer.sequence in record.loss.mixed
                example_gradient_squares(
                    errors.gradient, factors, sample, MIXED if is_mixed else layout
                )
        record.site_errors.append(errors)
        record.flops_seen += shape.flops

    def note_site(
        self,
        record: StepRecord,
        key: SiteKey,
        shape: SiteShape,
        weight: str | None,
        *,
        is_recomputed: bool = False,
    ) -> None:
        """Note one execution of a site."""
        row = {
            "op": shape.op,
            "batch": shape.batch,
            "m": shape.m,
            "n": shape.n,
            "k": shape.k,
            "dtype_a": shape.dtype_a,
            "dtype_b": shape.dtype_b,
            "dtype_out": shape.dtype_out,
            "layout_a": shape.layout_a,
            "layout_b": shape.layout_b,
            "weight": weight,
            "dispatchable": shape.bar is None,
            "not_dispatchable_reason": shape.bar,
            "flops": shape.flops,
        }
        noted = self._add_site(record, key, row)
        noted["executions"] += 1
        noted["recompute"] += int(is_recomputed)

    def follow(
        self, model: nn.Module, record: StepRecord, loss: CapturedLoss, layout_of: LayoutOf
    ) -> None:
        """Follow errors of activations' gradients to the parameters upstream."""
        try:
            record.upstream_reason = self._follower.follow(
                model, record, loss, self.settings.recipes, layout_of
            )
        except RuntimeError as error:  # what PyTorch refuses to differentiate twice
            record.upstream_reason = f"could not be followed upstream: {error}".splitlines()[0]

    def norm(
        self, record: StepRecord, key: SiteKey, op: str, x: torch.Tensor, y: torch.Tensor
    ) -> None:
        """Record the input and the output of a norm."""
        if x.numel() == 0 or y.numel() == 0 or x.ndim == 0:
            return
        width = x.shape[-1]
        row = {
            "op": op,
            "batch": 1,
            "m": x.numel() // width,
            "n": width,
            "k": 0,
            "dtype_a": dtype_name(x.dtype),
            "dtype_b": dtype_name(x.dtype),
            "dtype_out": dtype_name(y.dtype),
            "layout_a": layout_of(x) if x.ndim > 1 else "row",
            "layout_b": "row",
            "weight": None,
            "dispatchable": False,
            "not_dispatchable_reason": "a norm is observed and not replaced",
            "flops": 0.0,
        }
        self._add_site(record, key, row)["executions"] += 1
        for operand, tensor in ((Operand.INPUT, x), (Operand.OUTPUT, y)):
            self._add_operand(record, key, operand, tensor.detach(), None)

    def _errors(
        self,
        step: int,
        key: SiteKey,
        layer: Layer,
        factors: Factors,
        sample: Sample,
        budget: int,
        columns: int,
    ) -> SiteErrors:
        is_complete = sample.exact.numel() == factors.batch * factors.dims[0] * factors.dims[1]
        generator = self._sampler.generator(step, f"{key}/whole")
        whole = WholeSample.of(factors, generator, sample if is_complete else None)
        errors = recipe_errors(factors, sample, self.settings.recipes, layer.book, budget, whole)
        casts = {}
        for error in errors:
            casts[error.recipe.name] = _cast_columns(factors, layer.book, error)
        return SiteErrors(
            key=key,
            errors=errors,
            casts=casts,
            sampled_rows=sample.row_count,
            sampled_columns=columns,
        )

    def _add_site(self, record: StepRecord, key: SiteKey, row: dict[str, Any]) -> dict[str, Any]:
        whole = {
            "site": str(key),
            "fqn": key.fqn,
            "call": key.call,
            "role": str(key.role),
            **row,
            "module_type": self.module_types.get(key.fqn, "?"),
            "norm_after": None,
            "first_step": record.step,
            "executions": 0,
            "recompute": 0,
        }
        record.site_names.add(whole["site"])
        identity = (whole["site"], row["batch"], row["m"], row["n"], row["k"], row["dtype_a"])
        return record.site_rows.setdefault(identity, whole)

    def _note_operands(
        self,
        record: StepRecord,
        layer: Layer,
        key: SiteKey,
        factors: Factors,
        wanted: tuple[bool, bool],
    ) -> None:
        pairs = zip(factors.operands, (factors.left, factors.right), wanted, strict=True)
        for operand, x, is_wanted in pairs:
            if is_wanted:
                if operand is Operand.W and x.ndim == 3 and x.stride(0) == 0:
                    x = x[0]  # one parameter that serves the whole batch
                self._add_operand(record, key, operand, x, layer)

    def _note_joint(self, record: StepRecord, layer: Layer, factors: Factors) -> None:
        if layer.weight is None and factors.a.ndim == 3 and record.nonfinite is None:
            joint = joint_parts(factors.a, factors.b, self.settings.moments_width, layer.slots)
            last = record.operands[-1]
            if last.moments is not None:
                last.moments.update(joint)

    def _add_operand(
        self,
        record: StepRecord,
        key: SiteKey,
        operand: Operand,
        x: torch.Tensor,
        layer: Layer | None,
    ) -> None:
        statistics = operand_statistics(x)
        moments = None
        if layer is not None:
            if statistics.nonfinite_count:
                record.nonfinite = record.nonfinite or (
                    f"operand {operand} of {key} holds {statistics.nonfinite_count} Inf or NaN"
                )
                return
            moments = operand_parts(
                operand,
                x,
                self.settings.moments_width,
                layer.slots,
                has_parameter=layer.weight is not None,
            )
        record.operands.append(OperandSample(key, operand, dict(vars(statistics)), layer, moments))


def _slots(record: StepRecord, fqn: str, factors: Factors, found: Slots) -> Slots:
    """Return the kinds of a product's batch; where not known, those of an earlier such product."""
    if found.count == 1 and factors.batch > 1:
        for layer in reversed(record.layers):
            if layer.fqn == fqn and layer.products == factors.batch:
                return layer.slots
    return found


def _cast_columns(factors: Factors, book: ScaleBook, error: Any) -> dict[str, Any]:
    """Return the underflow, saturation and scale columns of a site under a recipe."""
    recipe = error.recipe
    nonzero = underflowed = 0
    worst_share, worst_group, saturation = 0.0, None, 0.0
    scales: list[float | None] = []
    sides = zip(
        factors.operands,
        (factors.left, factors.right),
        recipe.formats,
        recipe.scalings,
        contraction_axes(factors),
        strict=True,
    )
    for operand, x, fmt, scaling, axis in sides:
        scale = book.scale(str(operand), x, fmt, scaling, axis)
        if scale is None:
            raise ValueError(f"no scale for {operand} under {recipe.name}")
        events = book.events(str(operand), x, fmt, scaling, axis, scale)
        nonzero += events.nonzero
        underflowed += events.underflowed
        saturation = max(saturation, events.saturation_share)
        if events.worst_group is not None and events.worst_group_share > worst_share:
            worst_share = events.worst_group_share
            worst_group = f"{operand}[{events.worst_group.start}:{events.worst_group.stop}]"
        scales.append(float(scale) if scaling.is_per_tensor else None)
    return {
        "underflow_share": underflowed / nonzero if nonzero else 0.0,
        "underflow_share_worst_group": worst_share,
        "underflow_worst_group": worst_group,
        "saturation_share": saturation,
        "scale_a": scales[0],
        "scale_b": scales[1],
    }
