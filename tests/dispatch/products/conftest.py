"""Models that multiply otherwise than by nn.Linear, tables made from records of them, and a truth.

The truth is a dispatch mode that runs a plain model with every product of aten, forward and
backward, replaced by the float64 product of operands cast by ml_dtypes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from loka_toolkit.artifacts.dispatch_table import DispatchTable, Entry
from loka_toolkit.artifacts.sites import Role
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.dispatch import build_table
from loka_toolkit.recording import Schedule, record

aten = torch.ops.aten
FIRST = {
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.mv.default: 0,
    aten.dot.default: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
    aten.addmv.default: 1,
}


class Products(TorchDispatchMode):
    """Counts the products of aten, and computes them by ``compute`` where that is given."""

    def __init__(self, compute: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.compute = compute
        self.forward: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self.backward: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in FIRST:
            return func(*args, **kwargs)
        first = FIRST[func]
        a, b = args[first : first + 2]
        backward = torch._C._current_autograd_node() is not None
        (self.backward if backward else self.forward).append(
            (str(func), tuple(a.shape), tuple(b.shape))
        )
        if self.compute is None:
            return func(*args, **kwargs)
        out = self.compute(a, b) * kwargs.get("alpha", 1)
        return out + kwargs.get("beta", 1) * args[0] if first else out


@contextlib.contextmanager
def emulated(ml_product: Callable[..., Any]) -> Iterator[None]:
    """Run inside as if every product of aten were one of operands in E4M3, tensorwise."""

    def compute(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        left = a[None] if a.ndim == 1 else a
        right = b[:, None] if b.ndim == 1 else b
        product = torch.from_numpy(ml_product(left, right)).to(a.dtype)
        product = product.squeeze(-1) if b.ndim == 1 else product
        return product.squeeze(-1) if a.ndim == 1 else product

    with Products(compute):
        yield


def run_step(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], seed: int = 1
) -> dict[str, torch.Tensor]:
    """Return outputs and all gradients of one forward and backward."""
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    model.zero_grad(set_to_none=True)
    out = model(*leaves)
    out = out[0] if isinstance(out, tuple) else out
    generator = torch.Generator().manual_seed(seed)
    out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    found = {"out": out.detach()}
    found |= {f"input {i}": x.grad for i, x in enumerate(leaves) if x.grad is not None}
    return found | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def table_from_record(
    made: Any, model: nn.Module, inputs: tuple[torch.Tensor, ...], path: Any, **changes: Any
) -> DispatchTable:
    """Record one step of a model and build a table in which every recorded site is safe."""
    schedule = Schedule.always()
    with record(model, path, schedule=schedule, recipes=[made.CPU_RECIPE]) as recorder:
        run_step(model, inputs)
        recorder.step(examples=inputs[0].shape[0])
    cells = [
        made.cell(
            row["site"],
            made.CPU_RECIPE,
            **{
                "module_type": row["module_type"],
                "weight": row["weight"],
                "dispatchable": row["dispatchable"],
                "batch": row["batch"],
                "m": row["m"],
                "n": row["n"],
                "k": row["k"],
                "dtype": row["dtype_out"],
                **changes,
            },
        )
        for row in Trace.open(path).sites.to_pylist()
        if row["role"] != "norm"
    ]
    return build_table(made.safety_map(*cells), chip="cpu")


def product_entries(
    made: Any,
    fqn: str,
    weight: str | None,
    sizes: tuple[int, ...],
    *,
    call: int = 0,
    batch: int = 1,
    tokens: int = 64,
    roles: tuple[str, ...] | None = None,
    **changes: Any,
) -> tuple[Entry, ...]:
    """Make the entries of a layer: sizes are (O, I) with a parameter, else (M, N, K)."""
    if weight is not None:
        height, width = sizes
        dims = {"fwd": (None, height, width), "dgrad": (None, width, height)}
        dims["wgrad"] = (height, width, None)
    else:
        m, n, k = sizes
        dims = {"fwd": (m, n, k), "grad_a": (m, k, n), "grad_b": (k, n, m)}
    entries = []
    for role in roles or tuple(dims):
        kind = Role(role) if weight is not None else Role.FWD
        like = made.entry(fqn, nn.Linear(1, 1), kind, tokens=tokens, **changes)
        m, n, k = dims[role]
        sizes_of = {"role": role, "call": call, "weight": weight, "m": m, "n": n, "k": k}
        axis = like.token_axis if weight is not None else "batch"
        entries.append(msgspec.structs.replace(like, **sizes_of, token_axis=axis, batch=batch))
    return tuple(entries)


@pytest.fixture(scope="session")
def walk(made: Any) -> Any:
    """The functions of this file under one name."""

    class Walk:
        Products = Products
        LINEAR_ROLES = (Role.FWD, Role.DGRAD, Role.WGRAD)

    Walk.run_step = staticmethod(run_step)
    Walk.emulated = staticmethod(lambda: emulated(made.ml_product))
    Walk.table_from_record = staticmethod(
        lambda model, inputs, path, **changes: table_from_record(
            made, model, inputs, path, **changes
        )
    )
    Walk.entries = staticmethod(lambda *args, **more: product_entries(made, *args, **more))
    return Walk
