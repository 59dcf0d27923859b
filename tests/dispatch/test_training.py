"""Training with a table of every role, eager and compiled."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from loka_toolkit.dispatch import install

# Dynamo itself makes an instance of autograd.Function, of which torch itself then warns.
dynamo_instantiates_functions = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(13, 39),
        nn.LayerNorm(39),
        nn.ReLU(),
        nn.Linear(39, 26),
        nn.ReLU(),
        nn.Linear(26, 1),
    )


def clicks(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(128, 13, generator=generator)
    logit = x[:, :3].sum(1, keepdim=True) - x[:, 3:5].prod(1, keepdim=True)
    return x, (torch.rand(128, 1, generator=generator) < torch.sigmoid(2 * logit)).float()


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x, y = clicks(step)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", ["e4m3/tensorwise/fp32", "e5m2-e4m3/rowwise/fp32"])
def test_twenty_steps_reduce_the_loss_as_the_default_does(made, recipe):
    model = mlp()
    plain = copy.deepcopy(model)
    with install(model, made.full_table(model, recipe=recipe, tokens=128)) as installation:
        losses = torch.tensor(train(model, 20))
        counts = installation.counts()
    default = torch.tensor(train(plain, 20))
    assert counts.hits == {"fwd": 60, "dgrad": 40, "wgrad": 60} and not counts.misses
    drop = default[:3].mean() - default[-3:].mean()
    assert drop > 0.1, "the default itself must learn, or nothing is shown"
    # Paired over the same batches: the arms differ by rounding alone. Products carry 4 to 8 % of
    # relative error at random, so a step's loss may differ by as much of what was learnt so far;
    # a routed gradient that is wrong (transposed, unscaled, dropped) costs most of the drop.
    assert (losses - default).abs().max() < 0.15 * drop
    assert losses[-3:].mean() < default[:3].mean() - 0.85 * drop


def test_an_autocast_step_trains_too(made):
    model = mlp()
    with (
        install(model, made.full_table(model, dtype="bfloat16", tokens=128)) as installation,
        torch.autocast("cpu", torch.bfloat16),
    ):
        losses = train(model, 10)
        assert installation.counts().hits == {"fwd": 30, "dgrad": 20, "wgrad": 30}
    assert losses[-1] < losses[0]


@dynamo_instantiates_functions
def test_a_compiled_step_is_one_graph_with_the_bits_and_counts_of_the_eager_one(made):
    torch._dynamo.reset()
    model = mlp()
    x, _ = clicks(0)
    # 60 tokens: inside the interval of fwd and dgrad, outside that of wgrad (64 to 256).
    with install(model, made.full_table(model, tokens=128)) as installation:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
        for rows in (x, x[:60]):
            results = []
            for run in (model, compiled):
                model.zero_grad()
                run(rows).sum().backward()
                results.append([p.grad.clone() for p in model.parameters()])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        counts = installation.counts()
    # aot_eager decomposes layer_norm as eager does, so even the bits agree; products ran twice.
    assert counts.hits == {"fwd": 12, "dgrad": 8, "wgrad": 6}
    assert counts.misses == {"shape": {"wgrad": 6}}


@dynamo_instantiates_functions
def test_compiled_autocast_computes_in_the_dtype_of_eager(made):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(13, 39))
    x, _ = clicks(0)
    with install(model, made.full_table(model, dtype="bfloat16", tokens=128)):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with torch.autocast("cpu", torch.bfloat16):
            eager, graph = model(x), compiled(x)
    assert eager.dtype is graph.dtype is torch.bfloat16
    assert torch.equal(eager, graph)
