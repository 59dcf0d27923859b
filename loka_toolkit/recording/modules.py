"""Names of modules and parameters, and which module is running."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from loka_toolkit.artifacts.sites import ROOT_FQN, canonical_fqn
from loka_toolkit.errors import ConfigurationError

_NORM_TYPES = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._BatchNorm,
)
_NORM_NAME = re.compile(r"Norm(\d+d)?$")


@dataclasses.dataclass(frozen=True)
class ModelNames:
    """What the modules and parameters of a model are called in every artifact.

    Attributes:
        modules: Canonical path by module.
        types: Class name by canonical path; of a wrapper, the wrapped module's.
        parameters: Parameters by canonical name; of tied ones, only the first.
        owners: Canonical path of the module that owns a parameter, by the parameter's name.
        compiled: Canonical paths of modules compiled by torch.compile.
    """

    modules: dict[nn.Module, str]
    types: dict[str, str]
    parameters: dict[str, nn.Parameter]
    owners: dict[str, str]
    compiled: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ModelNames:
        """Name the parts of a model.

        Raises:
            ConfigurationError: If it is no module or has no parameters.
        """
        if not isinstance(model, nn.Module):
            raise ConfigurationError(
                f"model is a {type(model).__name__}; record() needs a torch.nn.Module"
            )
        modules = {module: canonical_fqn(name) for name, module in model.named_modules()}
        types: dict[str, str] = {}
        for module, fqn in modules.items():
            types[fqn] = type(module).__name__  # inner modules come after their wrappers
        parameters: dict[str, nn.Parameter] = {}
        owners: dict[str, str] = {}
        for name, parameter in model.named_parameters():
            fqn = canonical_fqn(name)
            parameters[fqn] = parameter
            owners[fqn] = canonical_fqn(name.rpartition(".")[0])
        if not parameters:
            raise ConfigurationError(
                f"model {type(model).__name__} has no parameters, so nothing of it is trained"
            )
        compiled = tuple(
            fqn
            for module, fqn in modules.items()
            if type(module).__name__ == "OptimizedModule"
            or getattr(module, "_compiled_call_impl", None) is not None
        )
        return cls(modules, types, parameters, owners, compiled)

    @property
    def has_batch_norm(self) -> bool:
        """Whether a module normalizes over examples."""
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.modules)

    def caveats(self) -> Iterator[tuple[str, str]]:
        """Yield kind and message of every event that the model itself gives rise to."""
        if self.compiled:
            yield (
                "compiled-model",
                "torch.compile wraps "
                + ", ".join(self.compiled)
                + "; recorded steps run it eagerly, which rounds otherwise and draws other "
                "dropout masks",
            )
        if self.has_batch_norm:
            yield (
                "examples-mix",
                "batch normalization makes examples depend on each other: the first order of "
                "impact accounts for that, the second order does not",
            )

    def is_norm(self, module: nn.Module) -> bool:
        """Whether a module normalizes, by its type or by its class name."""
        if isinstance(module, _NORM_TYPES):
            return True
        is_leaf = next(module.children(), None) is None
        return is_leaf and _NORM_NAME.search(type(module).__name__) is not None


def owners_of_parameters(model: nn.Module, names: ModelNames) -> dict[str, set[str]]:
    """Return all modules that register a parameter, by the parameter's first name."""
    first_name = {parameter: fqn for fqn, parameter in names.parameters.items()}
    owners: dict[str, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = canonical_fqn(name.rpartition(".")[0])
        owners.setdefault(first_name[parameter], set()).add(owner)
    return owners


@dataclasses.dataclass
class ModuleTracker:
    """Follows which module is running, by hooks that exist only during a recorded step.

    Attributes:
        model: The model.
        names: Its names.
        on_root: Called with True when a forward of the model begins, with its inputs, and with
            False when it ends.
        on_norm: Called with a norm module, its input and its output.
        guard: Runs a callable so that nothing is raised.
    """

    model: nn.Module
    names: ModelNames
    on_root: Callable[[bool, tuple[Any, ...]], None]
    on_norm: Callable[[str, torch.Tensor, torch.Tensor], None]
    guard: Callable[[Callable[[], None]], None]
    _stack: list[str] = dataclasses.field(default_factory=list)
    _handles: list[Any] = dataclasses.field(default_factory=list)
    _tied: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    _calls: Counter[str] = dataclasses.field(default_factory=Counter)

    def install(self) -> None:
        """Place the hooks."""
        self._stack.clear()
        self._calls.clear()
        self._tied = owners_of_parameters(self.model, self.names)
        for module, fqn in self.names.modules.items():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            self._handles.append(
                module.register_forward_pre_hook(self._before(module, fqn), with_kwargs=True)
            )
            self._handles.append(
                module.register_forward_hook(self._after(module, fqn), always_call=True)
            )

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()

    @property
    def current(self) -> str:
        """The innermost module that is running."""
        return self._stack[-1] if self._stack else ROOT_FQN

    def reset_calls(self) -> None:
        """Count products anew: a forward of the model begins."""
        self._calls.clear()

    def next_call(self, fqn: str) -> int:
        """Return the number of a module's next product."""
        self._calls[fqn] += 1
        return self._calls[fqn] - 1

    def module_of_product(self, parameter: str | None, innermost: str | None = None) -> str:
        """Return the module to which a product belongs.

        The innermost running module; or, if that one does not own the parameter multiplied but
        something inside it does, as with ``F.linear(x, layer.weight)``, that one.

        Args:
            parameter: Name of the parameter multiplied, or None.
            innermost: The innermost running module, where it is known better than from hooks.
        """
        current = innermost if innermost is not None else self.current
        if parameter is None:
            return current
        owners = self._tied.get(parameter, {self.names.owners[parameter]})
        if current in owners:
            return current
        inside = [o for o in sorted(owners) if current == ROOT_FQN or o.startswith(current + ".")]
        first = self.names.owners[parameter]
        return first if first in inside else (inside[0] if inside else current)

    def _before(self, module: nn.Module, fqn: str) -> Callable[..., None]:
        is_root = module is self.model

        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._stack.append(fqn)
            if is_root:
                self.guard(lambda: self.on_root(True, (args, kwargs)))

        return hook

    def _after(self, module: nn.Module, fqn: str) -> Callable[..., None]:
        is_root = module is self.model
        is_norm = self.names.is_norm(module)

        def hook(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if fqn in self._stack:
                while self._stack.pop() != fqn:
                    pass
            if is_norm and args and _are_tensors(args[0], output):
                self.guard(lambda: self.on_norm(fqn, args[0], output))
            if is_root:
                self.guard(lambda: self.on_root(False, ()))

        return hook


def _are_tensors(first: Any, second: Any) -> bool:
    return isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
