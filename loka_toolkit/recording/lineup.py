"""Which modules make up a model that is trained: told from what the optimizers hold.

Modules whose parameters are held by one optimizer are one model; so are optimizers that hold
parameters of one module. What neither joins is told apart.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import nn
from torch.optim import Optimizer


@dataclasses.dataclass(frozen=True)
class Lineup:
    """A model and who trains it.

    Attributes:
        model: The module to record; a :class:`Ensemble` where several belong together.
        parameters: Identities of its trained parameters.
        optimizers: The optimizers that hold them.
    """

    model: nn.Module
    parameters: frozenset[int]
    optimizers: tuple[Optimizer, ...]


class Ensemble(nn.Module):
    """Modules that one optimizer trains and no module of the script contains.

    Args:
        members: The modules by name.
    """

    def __init__(self, members: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, member in members.items():
            self.add_module(name, member)


def held_by(optimizers: Iterable[Optimizer]) -> dict[int, int]:
    """Return the place of every parameter that the optimizers hold, by its identity."""
    places: dict[int, int] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                places.setdefault(id(parameter), len(places))
    return places


def trained_parameters(module: nn.Module) -> set[int]:
    """Return the identities of a module's parameters that require a gradient."""
    return {id(parameter) for parameter in module.parameters() if parameter.requires_grad}


def joined_optimizers(
    parameters: set[int], optimizers: Sequence[Optimizer]
) -> tuple[list[Optimizer], set[int]]:
    """Return the optimizers that hold some of the parameters, or share some with one that does.

    Args:
        parameters: Identities of parameters.
        optimizers: All optimizers.

    Returns:
        The optimizers, and the identities of all parameters that they hold.
    """
    held = {id(optimizer): set(held_by([optimizer])) for optimizer in optimizers}
    joined: list[Optimizer] = []
    reached, found = set(parameters), True
    while found:
        found = False
        for optimizer in optimizers:
            is_new = all(optimizer is not known for known in joined)
            if is_new and held[id(optimizer)] & reached:
                joined.append(optimizer)
                reached |= held[id(optimizer)]
                found = True
    holding = set().union(*(held[id(optimizer)] for optimizer in joined))
    return [optimizer for optimizer in optimizers if _is_in(optimizer, joined)], holding


def line_up(
    start: nn.Module | Optimizer,
    optimizers: Sequence[Optimizer],
    taken: set[int],
    name_of: Callable[[nn.Module], str],
) -> Lineup | None:
    """Return the model to which a module, or what an optimizer holds, belongs.

    Args:
        start: The module whose forward begins, or the optimizer.
        optimizers: All optimizers that are alive.
        taken: Identities of parameters of models that are known already.
        name_of: Names the members of an ensemble.

    Returns:
        None if no optimizer holds a parameter of it that is not taken.
    """
    called = start if isinstance(start, nn.Module) else None
    first = set(held_by([start])) if isinstance(start, Optimizer) else trained_parameters(start)
    joined, parameters = joined_optimizers(first - taken, optimizers)
    parameters -= taken
    if not first & parameters:
        return None
    everything = set(held_by(optimizers))
    if called is not None:
        mine = trained_parameters(called) & everything
        if mine == parameters:
            return Lineup(called, frozenset(parameters), tuple(joined))
    roots = list(_largest_modules(called, parameters, everything))
    members = _cover(called, roots, held_by(joined), parameters)
    if not members:
        return None
    covered = frozenset().union(*(trained_parameters(m) & parameters for m in members))
    if len(members) == 1:
        return Lineup(members[0], covered, tuple(joined))
    named: dict[str, nn.Module] = {}
    for member in members:
        named[unused(name_of(member).replace(".", "_"), named)] = member
    return Lineup(Ensemble(named), covered, tuple(joined))


def count_other_models(lineup: Lineup, optimizers: Sequence[Optimizer]) -> int:
    """Return how many models the optimizers outside of a lineup seem to train."""
    rest = [one for one in optimizers if not _is_in(one, lineup.optimizers)]
    number = 0
    while rest:
        joined, held = joined_optimizers(set(held_by(rest[:1])), rest)
        number += any(True for _ in _largest_modules(None, held, held))
        rest = [one for one in rest if not _is_in(one, joined)]
    return number


def unused(name: str, taken: Iterable[str]) -> str:
    """Return the name, with a number behind it if it is taken."""
    names, number, fresh = set(taken), 1, name
    while fresh in names:
        number += 1
        fresh = f"{name}_{number}"
    return fresh


def _largest_modules(
    called: nn.Module | None, parameters: set[int], everything: set[int]
) -> Iterator[nn.Module]:
    """Yield the largest modules that hold some of the parameters and no others that are trained."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    modules = [one for one in modules if "_modules" in vars(one) and type(one) is not Ensemble]
    if called is not None:
        modules.append(called)
    inside = {id(child) for one in modules for child in one.children()}
    pending = [one for one in modules if id(one) not in inside]
    seen: set[int] = set()
    while pending:
        module = pending.pop(0)
        if id(module) in seen:
            continue
        seen.add(id(module))
        held = trained_parameters(module) & everything
        if held and held <= parameters:
            yield module
        elif held & parameters:
            pending += module.children()


def _cover(
    called: nn.Module | None,
    roots: Sequence[nn.Module],
    places: dict[int, int],
    parameters: set[int],
) -> list[nn.Module]:
    """Return few modules that hold all of the parameters, in the order of the optimizers."""

    def held(module: nn.Module) -> set[int]:
        return trained_parameters(module) & parameters

    def preference(module: nn.Module) -> tuple[bool, int, int, int]:
        contains = called is not None and any(one is called for one in module.modules())
        # Of wrappers of the same parameters, the one that contains what is called; the smallest.
        size = sum(1 for _ in module.modules())
        return not contains, -len(held(module)), min(places[p] for p in held(module)), size

    chosen: list[nn.Module] = []
    covered: set[int] = set()
    for module in sorted(roots, key=preference):
        if not held(module) <= covered:
            chosen.append(module)
            covered |= held(module)
    return sorted(chosen, key=lambda module: min(places[p] for p in held(module)))


def _is_in(optimizer: Optimizer, among: Iterable[Optimizer]) -> bool:
    return any(optimizer is one for one in among)
