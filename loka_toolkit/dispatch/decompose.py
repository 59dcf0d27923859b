"""What a call such as ``torch.matmul`` does in terms of aten: learned from aten itself.

``matmul``, ``linear``, ``einsum`` and their like are compositions of views, copies and of mm, bmm,
mv and the like, and which ones depends on shapes, strides and on who needs gradients. Instead
of repeating these rules, which change with torch's versions, a call is run once on tensors without
data (the ``meta`` device) while a dispatch mode writes down the operators. What was written down
can be run again on the real tensors, with autograd, and is then what aten would have done, operator
by operator, except that a product can be computed by something else.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten = torch.ops.aten

FIRST_FACTOR: dict[Any, int] = {
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
    aten.mv.default: 0,
    aten.addmv.default: 1,
    aten.dot.default: 0,
}
"""The products that a candidate may compute, and the position of their left factor."""

_OTHER_PRODUCTS = frozenset(
    {aten.addmm_, aten.baddbmm_, aten.addmv_, aten.addbmm, aten._addmm_activation, aten._int_mm}
)
"""Products that no candidate computes: in place, fused with an activation, summed over a batch."""

_SHOWING = frozenset(
    {
        aten.view,
        aten._unsafe_view,
        aten._reshape_alias,
        aten.t,
        aten.transpose,
        aten.permute,
        aten.expand,
        aten.unsqueeze,
        aten.squeeze,
        aten.squeeze_,
        aten.select,
        aten.slice,
        aten.alias,
        aten.clone,
        aten._to_copy,
    }
)
"""Operators whose result shows the elements of their first argument, in memory or in a copy."""

MOST_PROGRAMS = 4096
"""Recordings kept. A training job with ragged batches meets some hundreds of shapes per call."""


@dataclasses.dataclass(frozen=True)
class _Ref:
    """The value of that number: inputs first, then results of steps."""

    number: int


@dataclasses.dataclass(frozen=True)
class Product:
    """A product within a program.

    Attributes:
        step: Number of the step that computes it.
        batch: Number of products, 1 for mm.
        m: Rows of the output.
        n: Columns.
        k: Contraction length.
        source_a: Number of the input that the left factor shows, or None if it was computed.
        source_b: The same for the right factor.
    """

    step: int
    batch: int
    m: int
    n: int
    k: int
    source_a: int | None
    source_b: int | None


@dataclasses.dataclass(frozen=True)
class _Step:
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """What a call does, as a sequence of aten operators.

    Attributes:
        products: The products in it, in order.
        is_plain: Whether it holds nothing but products, views, copies and additions, so that
            autocast treats all of it alike.
        has_others: Whether it holds a product that no candidate computes.
    """

    products: tuple[Product, ...]
    is_plain: bool
    has_others: bool
    _steps: tuple[_Step, ...]
    _result: Any
    _values: int

    def run(self, inputs: Sequence[Tensor], routed: Mapping[int, Callable[..., Tensor]]) -> Any:
        """Return what the call returns.

        Args:
            inputs: The tensors among its arguments, in order.
            routed: What computes the product of a step instead of aten's operator; called with
                the operator and its arguments.
        """
        values: list[Any] = [*inputs, *[None] * (self._values - len(inputs))]
        for number, step in enumerate(self._steps):
            args = _filled(step.args, values)
            kwargs = {name: _filled(value, values) for name, value in step.kwargs.items()}
            instead = routed.get(number)
            out = step.op(*args, **kwargs) if instead is None else instead(step.op, args, kwargs)
            for place, result in zip(step.results, _results(out), strict=True):
                values[place] = result
        return _filled(self._result, values)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call taken apart.

    Attributes:
        key: Everything that decides what the call does, hashable.
        tensors: The tensors among its arguments, in order.
    """

    key: tuple[Any, ...]
    tensors: tuple[Tensor, ...]


def take_apart(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Return a call's key and tensors, or None if it holds what no key can.

    Args:
        func: The function called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    tensors: list[Tensor] = []
    try:
        shape = (_frozen(args, tensors), _frozen(tuple(kwargs.items()), tensors))
        key = (func, shape, torch.is_grad_enabled())
        hash(key)
    except TypeError:
        return None
    return Call(key, tuple(tensors))


def cast_as_autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as autocast does: floating-point tensors except float64."""
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


_PROGRAMS: dict[tuple[Any, ...], Program | None] = {}
_LOCK = threading.Lock()


def program_of(
    call: Call,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cast_to: torch.dtype | None,
) -> Program | None:
    """Return what a call does, from memory if it was met before.

    Args:
        call: The call, taken apart.
        func: The function called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        cast_to: Dtype to which autocast is going to cast floating-point tensors, or None.

    Returns:
        None if it cannot be learned: it raises, or an operator does what a program cannot hold.
    """
    key = (call.key, cast_to)
    if key in _PROGRAMS:
        return _PROGRAMS.get(key)
    program = _learn(func, args, kwargs, cast_to)
    with _LOCK:
        if len(_PROGRAMS) >= MOST_PROGRAMS:
            _PROGRAMS.pop(next(iter(_PROGRAMS)))
        _PROGRAMS[key] = program
    return program


def _frozen(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return (value.shape, value.stride(), value.dtype, value.requires_grad)
    if isinstance(value, list | tuple):
        return tuple([_frozen(item, tensors) for item in value])
    return (type(value), value)


class _Writer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operator with the numbers of the values it reads and makes.

    A value is known by its memory and by how it lies there: autograd may hand on a view as another
    Python object than the one that the operator returned.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[_Step] = []
        self.values = 0
        self.sources: dict[int, int] = {}
        self._numbers: dict[Any, int] = {}
        self._alive: list[Tensor] = []
        for number, tensor in enumerate(inputs):
            self._add(tensor)
            self.sources[number] = number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        read = self.numbered(args)
        named = {name: self.numbered(value) for name, value in kwargs.items()}
        out = func(*args, **kwargs)
        made = tuple(self._add(result) for result in _results(out))
        if func.overloadpacket in _SHOWING and isinstance(read[0], _Ref):
            source = self.sources.get(read[0].number)
            if source is not None:
                self.sources[made[0]] = source
        self.steps.append(_Step(func, read, named, made))
        return out

    def numbered(self, value: Any) -> Any:
        """Return a value with every tensor replaced by its number."""
        if isinstance(value, Tensor):
            return _Ref(self._numbers[_place(value)])
        if isinstance(value, list | tuple):
            return type(value)(self.numbered(item) for item in value)
        return value

    def _add(self, value: Tensor) -> int:
        self._alive.append(value)  # so that no later value gets its memory
        self._numbers[_place(value)] = self.values
        self.values += 1
        return self.values - 1


def _learn(func: Any, args: Any, kwargs: Any, cast_to: torch.dtype | None) -> Program | None:
    inputs: list[Tensor] = []
    has_gradients = torch.is_grad_enabled()
    try:
        # Whoever else looks at operators, such as a recorder, is to see none of these.
        with (
            _disable_current_modes(),
            torch.inference_mode(False),
            torch.set_grad_enabled(has_gradients),
        ):
            like_args = _without_data(args, inputs, cast_to)
            like_kwargs = {name: _without_data(v, inputs, cast_to) for name, v in kwargs.items()}
            writer = _Writer(inputs)
            with writer:
                out = func(*like_args, **like_kwargs)
            result = writer.numbered(out)
    except (RuntimeError, KeyError, TypeError, ValueError, NotImplementedError):
        return None  # the call itself is going to say what is wrong with it
    products = []
    for number, step in enumerate(writer.steps):
        first = FIRST_FACTOR.get(step.op)
        if first is None:
            continue
        a, b = step.args[first], step.args[first + 1]
        left, right = (writer._alive[factor.number] for factor in (a, b))
        products.append(
            Product(
                step=number,
                batch=left.shape[0] if left.ndim == 3 else 1,
                m=left.shape[-2] if left.ndim > 1 else 1,
                n=right.shape[-1] if right.ndim > 1 else 1,
                k=left.shape[-1],
                source_a=writer.sources.get(a.number),
                source_b=writer.sources.get(b.number),
            )
        )
    plain = {*_SHOWING, *(op.overloadpacket for op in FIRST_FACTOR), aten.add, aten.add_}
    return Program(
        products=tuple(products),
        is_plain=all(step.op.overloadpacket in plain for step in writer.steps),
        has_others=any(step.op.overloadpacket in _OTHER_PRODUCTS for step in writer.steps),
        _steps=tuple(writer.steps),
        _result=result,
        _values=writer.values,
    )


def _without_data(value: Any, inputs: list[Tensor], cast_to: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        like = torch.empty_strided(
            value.shape,
            value.stride(),
            dtype=value.dtype,
            device="meta",
            requires_grad=value.requires_grad,
        )
        if cast_to is not None:
            like = cast_as_autocast(like, cast_to)
        inputs.append(like)
        return like
    if isinstance(value, list | tuple):
        return type(value)(_without_data(item, inputs, cast_to) for item in value)
    return value


def _place(tensor: Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _filled(value: Any, values: Sequence[Any]) -> Any:
    if isinstance(value, _Ref):
        return values[value.number]
    if isinstance(value, list | tuple):
        return type(value)(_filled(item, values) for item in value)
    return value


def _results(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, list | tuple) else (out,)
