"""Where the modules and parameters of a model are, and whose a product is.

The rules are the recorder's: a product belongs to the innermost running module; or, if that one
does not own the parameter multiplied but something inside it does, as with
``F.linear(x, layer.weight)``, to that one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from loka_toolkit.artifacts.sites import ROOT_FQN, canonical_fqn
from loka_toolkit.dispatch.wrapping import RoutedModule, plain_class


@dataclasses.dataclass(frozen=True)
class Place:
    """A parameter of a model.

    Attributes:
        parameter: The parameter.
        owner: The module that registers it under its first name.
        attribute: Its name there.
        owner_fqn: That module's path.
        owner_fqns: The paths of all modules that register it.
    """

    parameter: nn.Parameter
    owner: nn.Module
    attribute: str
    owner_fqn: str
    owner_fqns: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Places:
    """The parts of a model by their canonical paths.

    Attributes:
        modules: Distinct modules by path; a shared module has several paths.
        parameters: Parameters by every name they have.
        paths: Every module with its first path, outer before inner.
    """

    modules: Mapping[str, tuple[nn.Module, ...]]
    parameters: Mapping[str, Place]
    paths: tuple[tuple[str, nn.Module], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Places:
        """Find the parts of a model."""
        modules: dict[str, list[nn.Module]] = {}
        names: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            mine = modules.setdefault(canonical_fqn(name), [])
            if all(module is not other for other in mine):
                mine.append(module)
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    names.setdefault(parameter, []).append((_joined(name, attribute), module))
        parameters: dict[str, Place] = {}
        for parameter, found in names.items():
            owners = [canonical_fqn(name.rpartition(".")[0]) for name, _ in found]
            first, owner = found[0]
            place = Place(parameter, owner, first.rpartition(".")[2], owners[0], frozenset(owners))
            for name, _ in found:
                parameters.setdefault(canonical_fqn(name), place)
        return cls(
            {fqn: tuple(found) for fqn, found in modules.items()},
            parameters,
            tuple((canonical_fqn(name), module) for name, module in model.named_modules()),
        )

    def innermost(self, fqn: str) -> nn.Module | None:
        """Return the module of a path, wrappers around it left out; None if it is ambiguous."""
        found = self.modules.get(fqn, ())
        for outer, inner in itertools.pairwise(found):
            if all(inner is not child for child in outer.children()):
                return None
        return found[-1] if found else None

    def runners(self, fqn: str, place: Place | None) -> tuple[nn.Module, ...]:
        """Return the modules whose running makes a product that of ``fqn``, outer before inner.

        Args:
            fqn: Path of the module to which the product belongs.
            place: The parameter multiplied, or None for a product of two activations.
        """
        module = self.innermost(fqn)
        if module is None:
            return ()
        if place is None:
            return (module,)
        first = next(path for path, other in self.paths if other is module)
        return tuple(
            running
            for path, running in self.paths
            if _owner_of_product(path, place) == first
            and self.innermost(path) is running
            and not never_runs(running)
        )


def _owner_of_product(running: str, place: Place) -> str:
    if running in place.owner_fqns:
        return running
    inside = [
        fqn
        for fqn in sorted(place.owner_fqns)
        if running == ROOT_FQN or fqn.startswith(running + ".")
    ]
    if place.owner_fqn in inside:
        return place.owner_fqn
    return inside[0] if inside else running


def has_products(module: nn.Module) -> bool:
    """Return whether a module may multiply, or call a module that may.

    The leaves of ``torch.nn`` other than its linear layers do not: activations, norms, dropout,
    embeddings and losses do no product, and convolutions and RNNs none that is caught.
    """
    plain = plain_class(type(module)) if isinstance(module, RoutedModule) else type(module)
    is_leaf = next(module.children(), None) is None
    own = plain.__module__.startswith("torch.nn.modules.") and is_leaf
    return isinstance(module, nn.Linear) or not own


def never_runs(module: nn.Module) -> bool:
    """Return whether a module has no forward, as the lists and dictionaries of ``torch.nn``.

    The last layer of PyTorch's attention has one, and is computed by a function all the same.
    """
    if isinstance(module, torch.jit.ScriptModule) or "forward" in module.__dict__:
        return False
    plain = plain_class(type(module)) if isinstance(module, RoutedModule) else type(module)
    return plain.forward is nn.Module.forward or plain is NonDynamicallyQuantizableLinear


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
