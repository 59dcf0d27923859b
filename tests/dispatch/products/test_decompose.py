"""What is learned of a call is what aten does with it, operator by operator and bit by bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_toolkit.dispatch.decompose import program_of, take_apart

SIZES = st.sampled_from([0, 1, 2, 3, 5])
LAYOUTS = st.sampled_from(["contiguous", "transposed", "strided", "expanded"])


def laid_out(shape, layout, needs, seed):
    generator = torch.Generator().manual_seed(seed)
    if layout == "transposed" and len(shape) > 1:
        x = torch.randn(*shape[:-2], shape[-1], shape[-2], generator=generator).mT
    elif layout == "strided":
        x = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator)[..., ::2]
    elif layout == "expanded" and len(shape) > 2:
        x = torch.randn(shape[1:], generator=generator).expand(shape)
    else:
        x = torch.randn(shape, generator=generator)
    return x.detach().requires_grad_(needs)


def products_seen(func, args, counter):
    with counter as mode:
        func(*args)
    return mode.forward


def compare(walk, func, args):
    """Hold the program of a call against the call."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    call = take_apart(func, args, {})
    program = program_of(call, func, args, {}, None)
    assert program is not None
    with walk.Products() as seen:
        expected = func(*args)
    dims = [(p.batch, p.m, p.n, p.k) for p in program.products]
    actual = []
    for _, a, b in seen.forward:
        a, b = (1, *a) if len(a) == 1 else a, (*b, 1) if len(b) == 1 else b
        actual.append((a[0] if len(a) == 3 else 1, a[-2], b[-1], a[-1]))
    assert dims == actual
    found = program.run(call.tensors, {})
    assert found.shape == expected.shape and found.stride() == expected.stride()
    assert torch.equal(found, expected) and found.requires_grad == expected.requires_grad
    leaves = [x for x in tensors if x.requires_grad]
    if leaves and expected.requires_grad:
        grads = [torch.autograd.grad(y.sum() * 2, leaves) for y in (found, expected)]
        assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    return program


@given(
    left=st.lists(SIZES, min_size=0, max_size=2),
    kind=st.sampled_from(["both", "left", "right", "neither"]),
    m=SIZES,
    n=SIZES,
    k=SIZES,
    layouts=st.tuples(LAYOUTS, LAYOUTS),
    needs=st.tuples(st.booleans(), st.booleans()),
    broadcast=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_matmul(walk, left, kind, m, n, k, layouts, needs, broadcast):
    leading = {"both": (left, left), "left": (left, []), "right": ([], left), "neither": ([], [])}
    first, second = leading[kind]
    if broadcast and first and second:
        second = [1, *second[1:]]
    a = laid_out((*first, m, k), layouts[0], needs[0], 1)
    b = laid_out((*second, k, n), layouts[1], needs[1], 2)
    compare(walk, torch.matmul, (a, b))


@pytest.mark.parametrize(
    ("a", "b"), [((5,), (5,)), ((3, 5), (5,)), ((5,), (5, 2)), ((5,), (2, 5, 3))]
)
def test_matmul_with_vectors(walk, a, b):
    program = compare(walk, torch.matmul, (torch.randn(a, requires_grad=True), torch.randn(b)))
    assert len(program.products) == 1


EQUATIONS = {
    "bi,oi->bo": ((5, 3), (2, 3)),
    "bi,io->bo": ((5, 3), (3, 2)),
    "io,bi->ob": ((3, 2), (5, 3)),
    "bij,bjk->bik": ((4, 2, 3), (4, 3, 5)),
    "bij,bkj->bki": ((4, 2, 3), (4, 5, 3)),
    "bnhd,bmhd->bhnm": ((2, 3, 4, 5), (2, 6, 4, 5)),
    "bhnm,bmhd->bnhd": ((2, 4, 3, 6), (2, 6, 4, 5)),
    "bi,fio->bfo": ((5, 3), (4, 3, 2)),
    "bfi,fio->bfo": ((5, 4, 3), (4, 3, 2)),
    "...i,oi->...o": ((2, 5, 3), (2, 3)),
    "bij,j->bi": ((5, 2, 3), (3,)),
    "bi,bi->b": ((5, 3), (5, 3)),
    "bi,bi->bi": ((5, 3), (5, 3)),
    "bij,jkl->bk": ((5, 2, 3), (3, 4, 6)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("needs", [(True, True), (False, True), (False, False)])
def test_einsum(walk, equation, needs):
    shapes = EQUATIONS[equation]
    a, b = (torch.randn(s, requires_grad=n) for s, n in zip(shapes, needs, strict=True))
    program = compare(walk, torch.einsum, (equation, a, b))
    assert len(program.products) == int(equation != "bi,bi->bi")


def test_a_chain_holds_several_products(walk):
    a, b, c = torch.randn(5, 3), torch.randn(3, 4, requires_grad=True), torch.randn(4, 2)
    assert len(compare(walk, torch.einsum, ("ij,jk,kl->il", a, b, c)).products) == 2
    chain = program_of(
        take_apart(torch.linalg.multi_dot, ([a, b, c],), {}),
        torch.linalg.multi_dot,
        ([a, b, c],),
        {},
        None,
    )
    assert [p.source_b for p in chain.products].count(None) <= 1 and len(chain.products) == 2


@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3), (2, 2, 5, 3), (3,), (0, 3)])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("needs", [True, False])
def test_linear(walk, shape, layout, bias, needs):
    x = laid_out(shape, layout, True, 1)
    w, b = torch.randn(4, 3, requires_grad=needs), torch.randn(4, requires_grad=needs)
    program = compare(walk, F.linear, (x, w, b) if bias else (x, w))
    for product in program.products:
        assert (product.source_a, product.source_b) == (0, 1)


@pytest.mark.parametrize("dims", [1, 2, ([0, 1], [1, 0]), ([2], [1])])
def test_tensordot(walk, dims):
    shapes = {1: ((2, 4, 3), (3, 5)), 2: ((2, 4, 3), (4, 3, 5))}
    a, b = (
        shapes[dims]
        if isinstance(dims, int)
        else ((2, 4, 3), (4, 2, 6) if len(dims[0]) == 2 else (5, 3))
    )
    a, b = torch.randn(a, requires_grad=True), torch.randn(b, requires_grad=True)
    call = take_apart(torch.tensordot, (a, b), {"dims": dims})
    program = program_of(call, torch.tensordot, (a, b), {"dims": dims}, None)
    found, expected = program.run(call.tensors, {}), torch.tensordot(a, b, dims=dims)
    assert torch.equal(found, expected) and len(program.products) == 1


def test_other_modes_see_nothing_of_the_learning(walk):
    a = torch.randn(7, 11)
    with walk.Products() as mode:
        call = take_apart(torch.matmul, (a, a.t()), {})
        assert len(program_of(call, torch.matmul, (a, a.t()), {}, None).products) == 1
    assert not mode.forward


def test_what_raises_cannot_be_learned():
    a = torch.randn(3, 4)
    call = take_apart(torch.matmul, (a, a), {})
    assert program_of(call, torch.matmul, (a, a), {}, None) is None
    assert take_apart(torch.matmul, (a, {"unhashable": []}), {}) is None
