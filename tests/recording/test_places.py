"""Which samples of an operand belong together: heads, whole matrices, joint and tied factors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from loka_toolkit.artifacts.sites import Operand
from loka_toolkit.recording.moments import BatchMoments
from loka_toolkit.recording.places import (
    Place,
    Slots,
    is_transpose,
    joint_parts,
    operand_parts,
)
from loka_toolkit.recording.sampling import RowLayout


@pytest.mark.parametrize(
    ("products", "rows", "layout", "expected"),
    [
        (128, 21, RowLayout(64, 1, 42), Slots(2)),  # (examples, heads, tokens)
        (128, 21, RowLayout(64, 2, 21), Slots(2, alternate=False)),  # (heads, examples, tokens)
        (64, 9, RowLayout(64, 1, 9), Slots()),  # one product per example
        (1, 64, RowLayout(64, 1, 1), Slots()),  # no batch
        (2048, 21, RowLayout(64, 1, 672), Slots()),  # 32 heads: too many to tell apart
        (8, 100, None, Slots(8)),  # a list of parameters
        (100, 8, None, Slots()),
        (6, 5, RowLayout(10, 1, 3), Slots(6)),
    ],
)
def test_kinds_of_products(products, rows, layout, expected):
    assert Slots.of(products, rows, layout) == expected


@pytest.mark.parametrize(
    ("products", "leading", "expected"),
    [
        (128, (64, 2, 21), Slots(2)),
        (128, (2, 64, 21), Slots(2, alternate=False)),
        (64, (64, 1, 21), Slots()),
        (128, (128, 21), Slots()),
        (640, (64, 2, 5, 21), Slots()),
        (100, (64, 2, 21), Slots()),
    ],
)
def test_kinds_of_products_where_the_examples_are_not_known(products, leading, expected):
    assert Slots.of(products, 21, None, leading) == expected


def test_products_are_split_by_kind():
    x = torch.arange(6.0).reshape(6, 1, 1)
    assert [p.flatten().tolist() for p in Slots(2).split(x)] == [[0, 2, 4], [1, 3, 5]]
    parts = Slots(2, alternate=False).split(x)
    assert [p.flatten().tolist() for p in parts] == [[0, 1, 2], [3, 4, 5]]


def test_whole_matrices_are_samples_of_batched_products():
    torch.manual_seed(0)
    x = torch.randn(128, 5, 3) + torch.arange(15.0).reshape(5, 3)
    parts = operand_parts(Operand.A, x, 64, Slots(2), has_parameter=False)
    assert set(parts) == {Place("a", 5, 0, 2), Place("a", 5, 1, 2), Place("a")}
    for slot in (0, 1):
        found = parts[Place("a", 5, slot, 2)]
        assert isinstance(found, BatchMoments) and found.count == 64
        torch.testing.assert_close(found.mean, x[slot::2].flatten(1).double().mean(0))
    rows = parts[Place("a")]
    assert isinstance(rows, BatchMoments) and (rows.count, rows.width) == (640, 3)


@pytest.mark.parametrize(
    ("shape", "reason"), [((8, 5, 3), "few products"), ((128, 70, 64), "large matrices")]
)
def test_rows_are_samples_otherwise(shape, reason):
    parts = operand_parts(Operand.G, torch.randn(shape), 64, Slots(), has_parameter=False)
    assert set(parts) == {Place("g")}, reason


def test_a_list_of_parameters_is_told_apart():
    weight, x = torch.randn(4, 6, 3), torch.randn(4, 50, 3)
    kinds = Slots(4)
    weights = operand_parts(Operand.W, weight, 64, kinds, has_parameter=True)
    assert set(weights) == {Place("w", 1, slot, 4) for slot in range(4)}
    for slot in range(4):
        assert torch.equal(weights[Place("w", 1, slot, 4)], weight[slot])
    inputs = operand_parts(Operand.X, x, 64, kinds, has_parameter=True)
    assert {p.slot for p in inputs} == {0, 1, 2, 3}
    assert all(isinstance(m, BatchMoments) and m.count == 50 for m in inputs.values())
    pooled = operand_parts(Operand.W, weight, 64, Slots(), has_parameter=True)
    assert pooled[Place("w")].shape == (24, 3)


def test_what_is_kept_of_a_weight_is_a_copy():
    weight = torch.randn(3, 2)
    kept = operand_parts(Operand.W, weight, 64, Slots(), has_parameter=True)[Place("w")]
    before = kept.clone()
    weight.zero_()
    assert torch.equal(kept, before)


def test_constant_rows_are_told_by_their_place_in_a_matrix():
    x = torch.randn(64, 3, 5)
    x[:16, 1] = x[:16, 1, :1]
    parts = operand_parts(Operand.A, x, 64, Slots(), has_parameter=False)
    assert parts[Place("a", 3)].equal_rows.tolist() == [0, 16, 0]
    assert parts[Place("a")].equal_rows.tolist() == [16]


def test_joint_and_tied_factors():
    z = torch.randn(64, 4, 3)
    assert joint_parts(z, z.mT, 64, Slots()) == {Place("b"): None}
    assert is_transpose(z, z.mT) and not is_transpose(z, z.mT.clone())
    other = torch.randn(64, 3, 4)
    joint = joint_parts(z, other, 64, Slots())
    assert set(joint) == {Place("ab")} and joint[Place("ab")].width == 24
    assert joint_parts(z, other, 23, Slots()) == {}


class Heads(nn.Module):
    """Attention of two unlike heads, and dot products of fields with themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 16)
        self.head = nn.Linear(5 * 8 + 25, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        q, k = self.project(x).chunk(2, dim=-1)
        q, k = (
            t.reshape(rows, tokens, 2, 4).transpose(1, 2).reshape(-1, tokens, 4) for t in (q, k)
        )
        scores = torch.bmm(q * torch.tensor([1.0, 50.0]).repeat(rows).reshape(-1, 1, 1), k.mT)
        mixed = scores.reshape(rows, 2, tokens, tokens).mean(1)
        dots = torch.bmm(x, x.mT)
        return self.head(torch.cat([x.flatten(1), (dots + 0 * mixed).flatten(1)], dim=1)).squeeze(1)


def test_a_recorder_tells_heads_apart_and_knows_tied_factors(
    record_run: Callable[..., Any],
) -> None:
    torch.manual_seed(0)
    model = Heads()
    x, y = torch.randn(64, 5, 8), torch.rand(64).round()
    x.requires_grad_()
    run = record_run(
        model,
        lambda step: nn.functional.binary_cross_entropy_with_logits(model(x), y),
        moments_width=64,
    )
    found = run.moments
    joint = found[(found.operand == "ab") & (found.site == "(root)#0:fwd")]
    assert joint.slots.tolist() == [2, 2] and sorted(joint.slot) == [0, 1]
    squares = [
        float(np.sum(np.reshape(row.covariance, (40, 40)).diagonal()[:20]))
        for row in joint.sort_values("slot").itertuples()
    ]
    assert squares[1] / squares[0] == pytest.approx(2500, rel=0.5)
    tied = found[(found.kind == "tied")]
    assert tied.site.tolist() == ["(root)#1:fwd"] and tied.operand.tolist() == ["b"]
    cross = found[found.operand == "gx"]
    assert set(cross.site) == {"project#0:wgrad", "head#0:wgrad"}
    spectra = found[found.kind == "spectrum"]
    assert set(spectra.operand) == {"w"} and spectra["count"].tolist() == [16, 1]
    wide = found[(found.site == "head#0:fwd") & (found.operand == "x")].iloc[0]
    assert wide.kind == "low-rank" and wide.width == 65
    assert len(wide.factors) % 65 == 0 and math.prod(np.shape(wide.covariance)) == 65


def test_moments_follow_the_trained_model(record_run: Callable[..., Any]) -> None:
    """Step 30 of a drifting input weighs a thousand times what step 0 does."""
    model = nn.Linear(3, 1)
    base = torch.randn(50, 3)

    def loss(step: int) -> torch.Tensor:
        return model(base + 100.0 * step).square().mean()

    run = record_run(model, loss, steps=31)
    row = run.moments[run.moments.operand == "x"].iloc[0]
    weights = (np.arange(31) + 1.0) ** 2
    expected = base.double().numpy().mean(0) + 100 * np.average(np.arange(31), weights=weights)
    np.testing.assert_allclose(row["mean"], expected, rtol=1e-5)
    assert row["count"] == 50 * 31 and row.steps == 31
