"""Work that runs more than once: recomputed, in micro-batches, twice differentiated, by hand."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

RECOMPUTE = "recompute: activation checkpointing"


def reasons(run, kind: str, step: int = 0) -> dict[str, float]:
    text = run.steps[f"{kind}_reason"][step]
    return json.loads(text) if isinstance(text, str) else {}


def executions(run) -> dict[str, tuple[int, int]]:
    chosen = run.sites[run.sites.role != "norm"]
    return {r.site: (r.executions, r.recompute) for r in chosen.itertuples()}


def squares(model, *inputs):
    return lambda _: model(*inputs).square().mean()


class Checkpointed(nn.Module):
    """One block, applied ``times`` times, each in a checkpoint of its own."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(13, 7)
        self.block = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))
        self.times = times
        self.reentrant: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for _ in range(self.times):
            if self.reentrant is None:
                h = self.block(h)
            else:
                h = checkpoint(self.block, h, use_reentrant=self.reentrant)
        return h


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(record_run, reentrant, times):
    """The same sites and figures as without, every forward of the block once more."""
    x = torch.randn(5, 13)
    model = Checkpointed(times)
    plain = record_run(model, squares(model, x), name="without")
    model.reentrant = reentrant
    run = record_run(model, squares(model, x), name="with")
    assert sorted(run.sites.site) == sorted(plain.sites.site)
    one, other = (r.errors.set_index(["site", "recipe"]).sort_index() for r in (run, plain))
    assert one.relative_frobenius.to_dict() == pytest.approx(other.relative_frobenius.to_dict())
    # What upstream of a gradient is reached depends on the graph, which checkpoints change.
    weights = one.index.get_level_values("site").str.endswith("wgrad")
    bias = one.gradient_bias[weights].to_dict()
    assert bias == pytest.approx(other.gradient_bias[weights].to_dict())
    assert all(value == value for value in bias.values())
    weights = dict(zip(run.sites.site, run.sites.weight, strict=True))
    assert weights == dict(zip(plain.sites.site, plain.sites.weight, strict=True))
    # Without reentrance a checkpoint stops early: nothing needs the last product of the block.
    again = {f"block.1#{i}:fwd" for i in range(times)}
    again |= {f"block.3#{i}:fwd" for i in range(times)} if reentrant else set()
    assert executions(run) == {
        site: (2, 1) if site in again else (1, 0) for site in executions(plain)
    }
    flops = 2.0 * 5 * 7 * 5 * times * (2 if reentrant else 1)
    assert reasons(run, "repeated") == {RECOMPUTE: flops}
    assert run.steps.gemm_flops_unseen[0] == 0
    assert run.steps.gemm_flops_seen[0] == plain.steps.gemm_flops_seen[0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_of_a_shared_block_belong_to_the_right_call(record_run, reentrant):
    """Each call's gradient has a variance of its own, known from the run without checkpoints."""
    model = Checkpointed(3)
    x = torch.randn(5, 13)
    plain = record_run(model, squares(model, x), name="without")
    model.reentrant = reentrant
    run = record_run(model, squares(model, x), name="with")
    for operand in "xg":
        one, other = (
            r.operands[r.operands.operand == operand].set_index("site").variance.sort_index()
            for r in (run, plain)
        )
        assert one.to_dict() == pytest.approx(other.to_dict())
        assert one.nunique() == len(one)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_nested_checkpoints(record_run):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.outer, self.inner = nn.Linear(7, 7), nn.Linear(7, 7)

        def part(self, x):
            h = self.outer(x).tanh()
            return checkpoint(self.inner, h, use_reentrant=True).tanh()

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=True)

    model = Nested()
    x = torch.randn(5, 7, requires_grad=True)
    run = record_run(model, squares(model, x))
    assert executions(run) == {
        "outer#0:fwd": (2, 1),
        "outer#0:dgrad": (1, 0),
        "outer#0:wgrad": (1, 0),
        "inner#0:fwd": (3, 2),  # by the outer checkpoint, and by its own
        "inner#0:dgrad": (1, 0),
        "inner#0:wgrad": (1, 0),
    }
    assert len(run.errors) == 6 * run.errors.recipe.nunique()


def test_micro_batches_are_executions_of_the_same_sites(record_run):
    model = nn.Sequential(nn.Linear(13, 7), nn.ReLU(), nn.Linear(7, 1))
    x, y = torch.randn(10, 13), torch.ones(10)

    def accumulated(_):
        with torch.no_grad():
            model(x)
        for part in (slice(0, 4), slice(4, 8), slice(8, 10)):
            loss = F.binary_cross_entropy_with_logits(model(x[part]).squeeze(-1), y[part]) / 3
            if part.start < 8:
                loss.backward()
        return loss

    run = record_run(model, accumulated)
    rows = run.sites.groupby("site")
    assert set(rows.groups) == {"0#0:fwd", "0#0:wgrad", "2#0:fwd", "2#0:dgrad", "2#0:wgrad"}
    # Two micro-batches of four rows are one shape; the last one of two rows is another.
    for site, group in rows:
        tokens = "k" if site.endswith("wgrad") else "m"
        assert dict(zip(group[tokens], group.executions, strict=True)) == {4: 2, 2: 1}
    assert (run.errors.groupby(["site", "recipe"]).size() == 1).all()
    forward, dgrad = 2 * (13 * 7 + 7), 2 * 7
    assert reasons(run, "unseen") == {"no gradient: evaluation or optimizer": 10 * forward}
    assert reasons(run, "repeated") == {"micro-batch": 6 * (2 * forward + dgrad)}
    assert run.steps.gemm_flops_seen[0] == 4 * (2 * forward + dgrad)
    row = run.error("0#0:fwd")
    assert row.impact_status == "ok"
    assert run.steps.loss_scale[0] == pytest.approx(1 / 3)
    assert run.steps.examples[0] == 4


def test_a_tower_that_only_a_later_micro_batch_uses_is_named_and_not_judged(record_run):
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(13, 1), nn.Linear(13, 1)

        def forward(self, x, side):
            return (self.left if side == "left" else self.right)(x)

    model = Towers()
    x = torch.randn(4, 13)

    def accumulated(_):
        model(x, "left").square().mean().backward()
        return model(x, "right").square().mean()

    run = record_run(model, accumulated)
    assert executions(run) == {
        f"{side}#0:{role}": (1, 0) for side in ("left", "right") for role in ("fwd", "wgrad")
    }
    assert {site.partition("#")[0] for site in run.errors.site} == {"left"}
    assert reasons(run, "not_judged") == {"first ran as: micro-batch": 2 * 2.0 * 4 * 13}


def test_two_calls_of_the_model_before_one_backward(record_run):
    model = nn.Linear(13, 7)
    users, items = torch.randn(5, 13), torch.randn(5, 13)
    run = record_run(model, lambda _: (model(users) * model(items)).sum())
    assert executions(run) == {"(root)#0:fwd": (2, 0), "(root)#0:wgrad": (2, 0)}
    assert set(reasons(run, "repeated")) == {"another forward of the model"}
    assert run.steps.gemm_flops_unseen[0] == 0


def test_names_restart_where_the_model_is_called_by_its_parts(record_run):
    """Nothing calls the model itself: a forward after a backward is another micro-batch."""
    model = nn.Sequential(nn.Linear(13, 7), nn.Linear(7, 1))
    x = torch.randn(4, 13)

    def accumulated(_):
        model.forward(x).square().mean().backward()
        return model[1](model[0](x)).square().mean()

    run = record_run(model, accumulated)
    assert {site: n for site, (n, _) in executions(run).items()} == {
        "0#0:fwd": 2,
        "0#0:wgrad": 2,
        "1#0:fwd": 2,
        "1#0:dgrad": 2,
        "1#0:wgrad": 2,
    }


class Counter(TorchDispatchMode):
    """FLOPs of mm and addmm."""

    flops = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.flops += 2.0 * out.numel() * args[-2].shape[-1]
        return out


def test_double_backward_is_counted_once(record_run):
    model = nn.Sequential(nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 1))
    x = torch.randn(5, 13, requires_grad=True)

    def penalized(_):
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.square().sum()

    run = record_run(model, penalized)
    forward = run.errors[run.errors.site.str.endswith("fwd")]
    assert set(forward.impact_status) == {"unknown"}
    assert set(executions(run)) == {f"{i}#0:{r}" for i in (0, 2) for r in ("fwd", "dgrad", "wgrad")}
    assert (run.errors.groupby(["site", "recipe"]).size() == 1).all()
    assert set(reasons(run, "repeated")) == {"second backward through the same forward"}
    # Of the two products that made the slope, gradients of either factor that needs one.
    first, last = 2.0 * 5 * 13 * 7, 2.0 * 5 * 7
    seen = run.steps.gemm_flops_seen[0]
    assert seen == 3 * (first + last)
    with Counter() as counter:
        penalized(0).backward()
    unseen, repeated = reasons(run, "unseen"), reasons(run, "repeated")
    assert set(unseen) == {"gradient of a gradient (create_graph)"}
    total = seen + sum(unseen.values()) + sum(repeated.values())
    assert total == counter.flops


class ByHand(torch.autograd.Function):
    """A product whose backward computes the forward once more."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.relu(x @ w.t())

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        g = g * (x @ w.t() > 0)
        return g @ w, g.t() @ x


def test_a_custom_function_is_attributed_and_its_recomputing_told(record_run):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.kernel = nn.Linear(13, 7), nn.Parameter(torch.randn(5, 7))

        def forward(self, x):
            return ByHand.apply(self.first(x), self.kernel)

    model = Model()
    x = torch.randn(11, 13)
    run = record_run(model, squares(model, x))
    assert executions(run) == {
        "first#0:fwd": (1, 0),
        "first#0:wgrad": (1, 0),
        "(root)#0:fwd": (2, 1),
        "(root)#0:dgrad": (1, 0),
        "(root)#0:wgrad": (1, 0),
    }
    flops = 2.0 * 11 * 7 * 5
    assert reasons(run, "repeated") == {"recompute: in the backward of a custom function": flops}
    dims = run.sites.set_index("site").loc["(root)#0:wgrad"]
    assert (dims.m, dims.n, dims.k, dims.weight) == (5, 7, 11, "kernel")


def test_a_custom_function_outside_of_the_model(record_run):
    model = nn.Linear(13, 7)
    x, kernel = torch.randn(11, 13), torch.randn(5, 7)
    run = record_run(model, lambda _: ByHand.apply(model(x), kernel).square().mean())
    assert run.steps.gemm_flops_unseen[0] == 0
    assert set(run.sites.role) == {"fwd", "wgrad", "grad_a", "grad_b"}


def test_executions_are_counted_anew_in_every_step(record_run):
    model = Checkpointed()
    model.reentrant = True
    run = record_run(model, squares(model, torch.randn(5, 13)), steps=3)
    assert max(n for n, _ in executions(run).values()) == 2
    assert run.steps.gemm_flops_repeated.nunique() == 1
    assert (run.errors.groupby(["site", "recipe"]).size() <= 3).all()
