"""What only a GPU can prove: permission, no synchronization, CUDA graphs, the true kernel."""

from __future__ import annotations

import copy

import msgspec
import pytest
import torch
from torch import nn

from loka_toolkit.artifacts.dispatch_table import DispatchTable
from loka_toolkit.artifacts.sites import Role
from loka_toolkit.dispatch import install
from loka_toolkit.environment import chip_of
from loka_toolkit.errors import TableRefusedError

pytestmark = pytest.mark.gpu
RECIPE = "e4m3/tensorwise/fast"
ROLES = (Role.FWD, Role.DGRAD, Role.WGRAD)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 39)).cuda().bfloat16()


def here(made, model: nn.Module, **options) -> DispatchTable:
    table = made.full_table(model, recipe=RECIPE, dtype="bfloat16", tokens=256, **options)
    validators = tuple(
        msgspec.structs.replace(v, expected=chip_of()) if v.name == "chip" else v
        for v in table.validators
    )
    return msgspec.structs.replace(table, chip=chip_of(), validators=validators)


def test_unmeasured_entries_need_permission(made):
    model = mlp()
    with pytest.raises(TableRefusedError, match="allow_unmeasured=True"):
        install(model, here(made, model, numerics="none"))
    with install(model, here(made, model, numerics="none"), allow_unmeasured=True) as handle:
        assert all(site.candidate for site in handle.sites())


def test_a_step_runs_scaled_mm_and_never_synchronizes(made):
    model = mlp()
    x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(256, 39, device="cuda", dtype=torch.bfloat16)
    plain = copy.deepcopy(model)
    plain(x).backward(g)
    with install(model, here(made, model)) as handle:
        model(x).backward(g)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x).backward(g)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(x).backward(g)
        assert handle.counts().hits == {"fwd": 6, "dgrad": 6, "wgrad": 6}
    seen = {event.key: event.count for event in profile.key_averages()}
    assert sum(count for name, count in seen.items() if "scaled_mm" in name and "aten" in name) >= 6
    # Two layers of E4M3 products: some 4 to 8 % of relative error.
    grad = model[0].weight.grad.float() / 3
    expected = plain[0].weight.grad.float()
    assert (grad - expected).norm() < 0.2 * expected.norm()


def test_cuda_graphs_replay_products_and_counters(made):
    model = mlp()
    x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)
    with install(model, here(made, model)) as handle, torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        before = handle.counts().hits["fwd"]
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
        assert handle.counts().hits["fwd"] == before + 6
        assert torch.equal(y, model(x))


def test_a_compiled_step_is_one_graph(made):
    model = mlp()
    x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)
    with install(model, here(made, model)) as handle:
        compiled = torch.compile(model, fullgraph=True)
        compiled(x).sum().backward()
        assert handle.counts().hits == {"fwd": 2, "dgrad": 1, "wgrad": 2}
