"""What the error of an activation's gradient does to the parameter gradients further upstream.

Backward is linear in the gradient it is given, so an error dg of the gradient of an activation
reaches the parameters as a backward pass from that activation, started with dg. Before the script's
own backward frees the graph, one pass is run for the true gradients and one for every site and
recipe that is looked at. These take turns over the recorded steps: each costs the backward of what
lies upstream, and the emulation of one whole product. Nothing is accumulated into parameters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from loka_toolkit.artifacts.sites import Role, SiteKey
from loka_toolkit.numerics.recipes import Recipe
from loka_toolkit.recording.layers import GradientColumns, Layer, StepRecord
from loka_toolkit.recording.loss import MIXED, CapturedLoss
from loka_toolkit.recording.products import Factors, GradientMatch, Product, gradient_factors
from loka_toolkit.recording.reached import (
    TABLE_NODES,
    ReachedTable,
    ReachedWeight,
    input_of,
    is_followed,
    reached_table,
    saved_factor,
)
from loka_toolkit.recording.reruns import why_packed
from loka_toolkit.recording.sampling import RowLayout
from loka_toolkit.recording.whatif import PROBE_PRODUCTS, Sample, recipe_errors

NOT_THIS_STEP = "not followed upstream at this step: sites and recipes take turns"
_NO_PARAMETER = "reaches no weight of a recorded product and no embedding table"

_SHARDED = ("FullyShardedDataParallel", "FSDP")
"""What class names of modules sharded by either FSDP begin with."""
_OTHER_KIND = "of a kind whose error is not followed upstream"

Reached = ReachedWeight | ReachedTable
_Products = dict[int | None, tuple[Layer, Any]]
LayoutOf = Callable[[tuple[int, ...]], RowLayout | str]


@dataclasses.dataclass(frozen=True)
class _Site:
    """A product of backward whose result flows on.

    Attributes:
        layer: Its layer.
        key: Its key.
        side: The forward factor whose gradient it is.
        node: The forward product's node.
        edge: Where the gradient flows to.
    """

    layer: Layer
    key: SiteKey
    side: str
    node: Any
    edge: GradientEdge

    def factors(self, gradient: torch.Tensor) -> Factors:
        """Return the product, given the gradient of the layer's output as aten has it."""
        of_a = self.side == "a"
        other = saved_factor(self.node, "b" if of_a else "a").mT
        left, right = (gradient, other) if of_a else (other, gradient)
        product = Product("", left, right, gradient, self.layer.alpha, False)
        return gradient_factors(product, self.layer.forward, GradientMatch(self.side, False))[0]

    def shape(self, gradient: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of the forward factor, given the gradient of the output."""
        forward = self.layer.forward
        last = (forward.m, forward.k) if self.side == "a" else (forward.k, forward.n)
        return (*gradient.shape[:-2], *last)

    def as_gradient(self, error: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the error of the canonical product as the gradient of the forward factor."""
        if self.layer.forward.parameter_side == "a":
            turned = (*shape[:-2], shape[-1], shape[-2])
            return error.reshape(turned).mT * self.layer.alpha
        return error.reshape(shape) * self.layer.alpha


class Follower:
    """Follows errors upstream, some sites and recipes at each recorded step.

    Args:
        limit: Sites and recipes per step, counted together; 0 for none.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turn = 0

    def follow(
        self,
        model: nn.Module,
        record: StepRecord,
        loss: CapturedLoss,
        recipes: tuple[Recipe, ...],
        layout_of: LayoutOf,
    ) -> str | None:
        """Fill in ``record.upstream`` for the sites whose turn it is.

        Args:
            model: The model.
            record: The step, its backward about to begin.
            loss: What is about to be differentiated.
            recipes: The recipes.
            layout_of: Returns the layout of rows flattened from given sizes.

        Returns:
            None, or the reason why nothing can be followed.
        """
        if not self._limit:
            return "not followed upstream: record with upstream_cells"
        if any(type(module).__name__.startswith(_SHARDED) for module in model.modules()):
            return "parameters are sharded, and gathered by hooks that may not run twice"
        nodes = _nodes([root.grad_fn for root in loss.roots if root.grad_fn is not None])
        if nodes is None:
            return "the graph holds custom functions, which are not run twice"
        if (why := record.no_rerun or why_packed(nodes)) is not None:
            return why
        numbers = {int(node._sequence_nr()): node for node in nodes if is_followed(node)}
        products: _Products = {
            layer.sequence: (layer, numbers[layer.sequence])
            for layer in record.layers
            if layer.sequence in numbers
        }
        for layer in record.layers:
            for role in (Role.DGRAD, Role.GRAD_A, Role.GRAD_B):
                if layer.sequence not in products:
                    record.upstream[layer.site(role)] = GradientColumns(reason=_OTHER_KIND)
        sites = _sites(products)
        cells = [(site, recipe) for site in sites for recipe in recipes]
        if not cells:
            return None
        taken = min(self._limit, len(cells))
        chosen = [cells[(self._turn + i) % len(cells)] for i in range(taken)]
        self._turn = (self._turn + taken) % len(cells)
        wanted: dict[SiteKey, list[Recipe]] = {}
        for site, recipe in chosen:
            wanted.setdefault(site.key, []).append(recipe)
        targets = _targets(record.step, products, nodes, layout_of, loss.mixed)
        active = [site for site in sites if site.key in wanted]
        gradients = _backward(loss, [*targets, *(site.node for site in active)])
        for site in active:
            record.upstream[site.key] = _columns(
                site, tuple(wanted[site.key]), targets, gradients, loss.loss_scale
            )
        return None


def _nodes(roots: list[Any]) -> list[Any] | None:
    """Return every node behind the roots; None if one runs Python code."""
    seen, pending = set(roots), list(roots)
    while pending:
        node = pending.pop()
        if isinstance(node, BackwardCFunction):
            return None
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return list(seen)


def _sites(products: _Products) -> list[_Site]:
    found = []
    for layer, node in products.values():
        parameter = layer.forward.parameter_side
        for side, role in (("a", Role.GRAD_A), ("b", Role.GRAD_B)):
            following, number = input_of(node, side)
            if side == parameter or following is None:
                continue
            key = layer.site(role if parameter is None else Role.DGRAD)
            found.append(_Site(layer, key, side, node, GradientEdge(following, number)))
    return found


def _targets(
    step: int,
    products: _Products,
    nodes: list[Any],
    layout_of: LayoutOf,
    mixed: frozenset[int],
) -> dict[Any, Reached]:
    """Return everything with a parameter, by node."""
    targets: dict[Any, Reached] = {}
    for sequence, (layer, node) in products.items():
        if layer.weight is not None and not layer.has_broadcast_weight:
            seed = step * 7919 + (sequence or 0)
            layout = MIXED if sequence in mixed else layout_of(layer.leading)
            targets[node] = ReachedWeight.of(layer, node, layout, seed)
    for node in nodes:
        if node.name() in TABLE_NODES:
            width = int(node._input_metadata[0].shape[-1])
            table = reached_table(node, layout_of, width, step)
            if table is not None:
                is_mixed = int(node._sequence_nr()) in mixed
                targets[node] = dataclasses.replace(table, layout=MIXED) if is_mixed else table
    return targets


def _backward(loss: CapturedLoss, nodes: list[Any]) -> dict[Any, torch.Tensor]:
    """Return the true gradient of the outputs of some nodes."""
    unique = list(dict.fromkeys(nodes))
    with torch.enable_grad():
        found = torch.autograd.grad(
            loss.roots,
            [GradientEdge(node, 0) for node in unique],
            grad_outputs=loss.root_gradients,
            retain_graph=True,
            allow_unused=True,
        )
    pairs = zip(unique, found, strict=True)
    return {node: gradient.detach() for node, gradient in pairs if gradient is not None}


def _columns(
    site: _Site,
    recipes: tuple[Recipe, ...],
    targets: dict[Any, Reached],
    gradients: dict[Any, torch.Tensor],
    loss_scale: float | None,
) -> GradientColumns:
    """Return bias and noise of the parameter gradients that a site reaches."""
    columns = GradientColumns(reason=_NO_PARAMETER)
    behind = set(_nodes([site.edge.node]) or ())
    reached = {n: t for n, t in targets.items() if n in behind and n in gradients}
    if not reached or site.node not in gradients:
        return columns
    columns.reason = None
    exact = {node: target.gradient(gradients[node]) for node, target in reached.items()}
    columns.gradient_squares = sum(
        reached[node].share * float(g.square().sum()) for node, g in exact.items()
    )
    if columns.gradient_squares == 0:
        columns.reason = "the gradient is zero"
        return columns
    _add_example_squares(columns, reached, gradients)
    site.layer.book.loss_scale = loss_scale or 1.0
    factors = site.factors(gradients[site.node])
    sample = Sample.of(factors, rows=None, columns=None, batch=None)
    shape = site.shape(gradients[site.node])
    for error in recipe_errors(factors, sample, recipes, site.layer.book, PROBE_PRODUCTS):
        if not bool(torch.isfinite(error.error).all()):
            columns.bias[error.recipe.name] = math.nan
            continue
        start = site.as_gradient(error.error, shape)
        bias, squares = _pushed(site, start, reached, exact)
        columns.bias[error.recipe.name] = bias / columns.gradient_squares
        columns.error_squares[error.recipe.name] = squares
    return columns


def _pushed(
    site: _Site,
    start: torch.Tensor,
    reached: dict[Any, Reached],
    exact: dict[Any, torch.Tensor],
) -> tuple[float, float]:
    """Return <dG, G> and |dG|^2 over everything that an error reaches."""
    largest = float(start.abs().amax()) if start.numel() else 0.0
    if largest == 0:
        return 0.0, 0.0
    # In float16 an error may be too small to be carried: bring it near 1, by a power of two.
    factor = 2.0 ** -math.floor(math.log2(largest))
    found: Any  # typed without the None that allow_unused gives
    with torch.enable_grad():
        found = torch.autograd.grad(
            site.edge,
            [GradientEdge(node, 0) for node in reached],
            grad_outputs=(start * factor).to(_dtype(site)),
            retain_graph=True,
            allow_unused=True,
        )
    bias = squares = 0.0
    for node, moved in zip(reached, found, strict=True):
        if moved is None:
            continue
        change = reached[node].gradient(moved.detach()) / factor
        bias += reached[node].share * float((change * exact[node]).sum())
        squares += reached[node].share * float(change.square().sum())
    return bias, squares


def _dtype(site: _Site) -> torch.dtype:
    dtype: torch.dtype = site.edge.node._input_metadata[site.edge.output_nr].dtype
    return dtype


def _add_example_squares(
    columns: GradientColumns, reached: dict[Any, Reached], gradients: dict[Any, torch.Tensor]
) -> None:
    total = 0.0
    for node, target in reached.items():
        found = target.example_squares(gradients[node])
        if isinstance(found, str):
            columns.reason = found
            return
        squares, layout = found
        total += target.share * squares
        if columns.layout is not None and columns.layout.examples != layout.examples:
            columns.reason = "parameters disagree on the number of examples"
            return
        columns.layout = layout
    columns.example_squares = total
