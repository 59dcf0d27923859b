"""How much FP8 could gain on a model at most, by roofline, before anything is judged or measured.

Amdahl's law over the step's GEMMs: every product may run in the fastest recipe that the chip
computes, whatever its error, and each layer takes the roles and recipes of least time together,
with each cast charged once to its layer. Three accounts:

- stand-alone casts: every FP8 copy is written by a kernel of its own that reads 16 bits;
- fused casts: whatever writes an activation or a gradient writes FP8 as well, which moves no more
  bytes than its 16 bits did; it takes a scale known beforehand. Weights, and the inputs of layers
  without dgrad (a model's first ones: nothing of the model produces them), are cast stand-alone;
- Mods on top: the forward pass of the norm behind a product is fused into the product's epilogue,
  and the bias is gone, whose gradient is one more pass over g.

What is no GEMM of the trace (embeddings, optimizer, communication) is in no account; the time of a
whole step says how much that is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from loka_toolkit.artifacts.sites import Operand, Role
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.errors import ConfigurationError
from loka_toolkit.harness.workloads import Factor, Workload, workloads_of
from loka_toolkit.kernels.contract import Side
from loka_toolkit.numerics.chips import ChipData
from loka_toolkit.numerics.recipes import Recipe, Scaling
from loka_toolkit.numerics.roofline import cast_time_us, gemm_time_us, stream_time_us

BASELINE = "bf16"
"""What FP8 competes with on chips that have it."""

_SIXTEEN_BITS = 2


@dataclasses.dataclass(frozen=True)
class LayerCeiling:
    """What a layer takes in one step at best.

    Attributes:
        layer: Name of the layer.
        roles: Its roles, with the dimensions ``batch x m x n x k`` of the median shape of each.
        executions: How often its products run in a step.
        baseline_us: Time of its products in 16 bits, in microseconds per step.
        standalone_us: At best with stand-alone casts.
        fused_us: At best with casts fused in producers.
        removed_us: What Mods could take away in addition: the norm's forward pass behind the
            product, and the gradient of the bias.
        standalone: Recipe by role; roles that are not in it stay in 16 bits.
        fused: The same with fused casts.
    """

    layer: str
    roles: dict[str, str]
    executions: int
    baseline_us: float
    standalone_us: float
    fused_us: float
    removed_us: float
    standalone: dict[str, str]
    fused: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """The most that FP8 could gain on a chip; nothing was run.

    Attributes:
        chip: Name of the chip.
        measured: Whether the chip's constants come from measurements on it.
        baseline: The recipe compared with.
        recipes: Recipes considered, in the chip's own formats.
        layers: The layers, largest saving with fused casts first.
        not_counted: Sites that no kernel can stand in for; their time is in no account.
        step_ms: Time of one optimizer step in 16 bits as the user gave it, or None.
    """

    chip: str
    measured: bool
    baseline: str
    recipes: tuple[str, ...]
    layers: tuple[LayerCeiling, ...]
    not_counted: tuple[str, ...]
    step_ms: float | None

    @property
    def baseline_us(self) -> float:
        """Time of all products in 16 bits, in microseconds per step."""
        return sum(layer.baseline_us for layer in self.layers)

    @property
    def removed_us(self) -> float:
        """Time of the passes that Mods could take away, in microseconds per step."""
        return sum(layer.removed_us for layer in self.layers)

    def gains(self) -> dict[str, Gain]:
        """Return the gain of each account by its name."""
        saved = {
            "stand-alone casts": sum(x.baseline_us - x.standalone_us for x in self.layers),
            "fused casts": sum(x.baseline_us - x.fused_us for x in self.layers),
        }
        saved["fused casts and Mods"] = saved["fused casts"] + self.removed_us
        return {name: self._gain(value, "Mods" in name) for name, value in saved.items()}

    def _gain(self, saved_us: float, with_mods: bool) -> Gain:
        whole = self.baseline_us + (self.removed_us if with_mods else 0.0)
        step = None
        if self.step_ms is not None:
            step = self.step_ms / (self.step_ms - saved_us / 1e3)
        return Gain(saved_us, whole / (whole - saved_us) if whole else 1.0, step)


@dataclasses.dataclass(frozen=True)
class Gain:
    """What one account could save.

    Attributes:
        saved_us: Microseconds per step.
        gemms: Time of the products (with Mods: and of the passes taken away) before over after.
        step: Time of the whole step before over after; None if it is not known.
    """

    saved_us: float
    gemms: float
    step: float | None


def ceiling(
    trace: Trace, chip: ChipData, recipes: Sequence[Recipe], step_ms: float | None = None
) -> Ceiling:
    """Return the most that FP8 could gain on a model.

    Args:
        trace: Its trace.
        chip: The chip.
        recipes: FP8 recipes that the chip computes.
        step_ms: Time of one optimizer step in 16 bits on that chip, in milliseconds.

    Raises:
        ReplayError: If the trace holds no GEMM.
        ConfigurationError: If a step is shorter than its own products, or not positive.
    """
    plan = workloads_of(trace, shapes_per_site=1)
    facts = _facts(trace)
    layers: dict[str, list[Workload]] = defaultdict(list)
    for workload in plan.workloads:
        layers[workload.site.layer].append(workload)
    known: dict[tuple[object, ...], _Best] = {}
    found = []
    for name, workloads in layers.items():
        products = tuple((w, facts[str(w.site)].executions) for w in workloads)
        key = tuple((w.problem, runs) for w, runs in products)
        if key not in known:
            known[key] = _best(products, chip, recipes)
        found.append(_layer(name, products, known[key], facts, chip))
    found.sort(key=lambda layer: (layer.fused_us - layer.baseline_us, layer.layer))
    result = Ceiling(
        chip=chip.name,
        measured=chip.measured,
        baseline=BASELINE,
        recipes=tuple(recipe.name for recipe in recipes),
        layers=tuple(found),
        not_counted=plan.not_dispatchable,
        step_ms=step_ms,
    )
    least_ms = (result.baseline_us + result.removed_us) / 1e3
    if step_ms is not None and not step_ms > least_ms:
        raise ConfigurationError(
            f"a step of {step_ms:g} ms is no longer than the {least_ms:.3g} ms that its products, "
            f"norms and bias gradients alone take on {chip.name} in {BASELINE}; give the time of "
            "one optimizer step of this model, at the recorded batch size, on that chip"
        )
    return result


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What a site's rows say beyond its shape."""

    executions: int
    feeds_norm: bool
    has_bias: bool


def _facts(trace: Trace) -> dict[str, _Facts]:
    found: dict[str, _Facts] = {}
    for row in trace.sites.to_pylist():
        before = found.get(row["site"], _Facts(1, False, False))
        found[row["site"]] = _Facts(
            executions=max(before.executions, int(row["executions"])),
            feeds_norm=before.feeds_norm or row["norm_after"] is not None,
            has_bias=before.has_bias or "addmm" in row["op"],
        )
    return found


_Products = Sequence[tuple[Workload, int]]
"""The products of a layer, and how often each runs in a step."""


@dataclasses.dataclass(frozen=True)
class _Choice:
    """Time of a layer in a step, in microseconds, and the recipe of each role in FP8."""

    time_us: float
    recipes: dict[str, str]


@dataclasses.dataclass(frozen=True)
class _Best:
    """The least times of a layer."""

    baseline_us: float
    standalone: _Choice
    fused: _Choice


def _best(products: _Products, chip: ChipData, recipes: Sequence[Recipe]) -> _Best:
    is_first = all(w.site.role is not Role.DGRAD for w, _ in products)
    default = [runs * _product_us(w, BASELINE, chip) for w, runs in products]
    times = {r: [runs * _product_us(w, r, chip) for w, runs in products] for r in recipes}
    runs = max(runs for _, runs in products)
    choices = []
    for fused in (False, True):
        best = _Choice(sum(default), {})
        for combination in itertools.product((None, *recipes), repeat=len(products)):
            routed, time = [], 0.0
            for at, recipe in enumerate(combination):
                time += default[at] if recipe is None else times[recipe][at]
                if recipe is not None:
                    routed.append((products[at][0], recipe))
            time += runs * _casts_us(routed, chip, fused=fused, is_first=is_first)
            if time < best.time_us:
                best = _Choice(time, {w.site.role.value: r.name for w, r in routed})
        choices.append(best)
    return _Best(sum(default), *choices)


def _product_us(workload: Workload, recipe: Recipe | str, chip: ChipData) -> float:
    p = workload.problem
    return gemm_time_us(p.batch, p.m, p.n, p.k, recipe, chip)


def _casts_us(
    routed: Iterable[tuple[Workload, Recipe]], chip: ChipData, *, fused: bool, is_first: bool
) -> float:
    """Return the time of the casts that products of one layer need, each of them once."""
    copies: dict[tuple[Operand, str, Scaling, str | None], set[str]] = defaultdict(set)
    sizes: dict[Operand, tuple[int, int]] = {}
    for workload, recipe in routed:
        sides = zip(
            (workload.a, workload.b),
            (recipe.format_a, recipe.format_b),
            recipe.scalings,
            strict=True,
        )
        for factor, name, scaling in sides:
            if scaling is Scaling.UNSCALED or _is_free(factor.operand, scaling, fused, is_first):
                continue
            layout = _layout(factor)
            # A scale per row of one layout is not that of the other: two casts.
            shared = None if scaling.is_per_tensor else layout
            copies[factor.operand, name, scaling, shared].add(layout)
            sizes[factor.operand] = (workload.problem.batch * factor.rows, factor.width)
    return sum(
        cast_time_us(*sizes[operand], scaling, chip, copies=len(layouts))
        for (operand, _, scaling, _), layouts in copies.items()
    )


def _is_free(operand: Operand, scaling: Scaling, fused: bool, is_first: bool) -> bool:
    produced = operand is not Operand.W and not (operand is Operand.X and is_first)
    return fused and produced and scaling is Scaling.STATIC


def _layout(factor: Factor) -> str:
    """Return how the operand is read along the contraction: as it is, or transposed."""
    return "row" if (factor.side is Side.A) is not factor.transposed else "column"


def _layer(
    name: str, products: _Products, best: _Best, facts: Mapping[str, _Facts], chip: ChipData
) -> LayerCeiling:
    shapes = {
        w.site.role.value: f"{w.problem.batch}x{w.problem.m}x{w.problem.n}x{w.problem.k}"
        for w, _ in products
    }
    removed = sum(
        runs * _removed_us(w, facts[str(w.site)], chip)
        for w, runs in products
        if w.site.role is Role.FWD
    )
    return LayerCeiling(
        layer=name,
        roles=shapes,
        executions=max(runs for _, runs in products),
        baseline_us=best.baseline_us,
        standalone_us=best.standalone.time_us,
        fused_us=best.fused.time_us,
        removed_us=removed,
        standalone=best.standalone.recipes,
        fused=best.fused.recipes,
    )


def _removed_us(workload: Workload, facts: _Facts, chip: ChipData) -> float:
    """Return the passes over a product's output that Mods could take away."""
    p = workload.problem
    size = _SIXTEEN_BITS * p.batch * p.m * p.n
    if not size:
        return 0.0
    norm = stream_time_us(size, size, chip) if facts.feeds_norm else 0.0
    bias = stream_time_us(size, 0, chip) if facts.has_bias else 0.0
    return norm + bias
