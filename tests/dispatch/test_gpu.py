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


class Products(nn.Module):
    """A parameter on the left, one in three dimensions, and products of activations in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(48, 39) / 6)
        self.experts = nn.Parameter(torch.randn(4, 48, 32) / 7)

    def forward(self, x):
        h = (self.left @ x.t()).t().relu()
        fields = torch.einsum("bi,fio->bfo", h, self.experts).view(4, -1, 32)
        return torch.bmm(fields, fields.mT) @ fields


def entries_of_products(made) -> DispatchTable:
    """Make entries for 256 rows: sizes as the signatures name them."""
    parameters = {"left": (48, 39), "experts": (128, 48)}
    entries = []
    for call, (weight, (height, width)) in enumerate(parameters.items()):
        for role in ROLES:
            like = made.entry(
                "(root)",
                nn.Linear(width, height),
                role,
                recipe=RECIPE,
                dtype="bfloat16",
                tokens=256,
            )
            entries.append(msgspec.structs.replace(like, call=call, weight=weight))
    for call, (m, n, k) in enumerate([(256, 256, 32), (256, 32, 256)], start=2):
        sizes = {"fwd": (m, n, k), "grad_a": (m, k, n), "grad_b": (k, n, m)}
        for role, (rows, columns, depth) in sizes.items():
            like = made.entry(
                "(root)", nn.Linear(1, 1), Role.FWD, recipe=RECIPE, dtype="bfloat16", tokens=4
            )
            changes = {"role": role, "m": rows, "n": columns, "k": depth, "batch": 4}
            entries.append(msgspec.structs.replace(like, call=call, token_axis="batch", **changes))
    table = made.table_of(*entries)
    validators = tuple(
        msgspec.structs.replace(v, expected=chip_of()) if v.name == "chip" else v
        for v in table.validators
    )
    return msgspec.structs.replace(table, chip=chip_of(), validators=validators)


def test_caught_products_run_scaled_mm_and_never_synchronize(made):
    torch.manual_seed(0)
    model = Products().cuda().bfloat16()
    plain = copy.deepcopy(model)
    x = torch.randn(256, 39, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(4, 256, 32, device="cuda", dtype=torch.bfloat16)
    plain(x).backward(g)
    with install(model, entries_of_products(made)) as handle:
        assert all(site.candidate for site in handle.sites())
        model(x).backward(g)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x).backward(g)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        counts = handle.counts()
    assert counts.hits == {"fwd": 8, "dgrad": 4, "wgrad": 4, "grad_a": 4, "grad_b": 4}
    assert not counts.misses
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        # Four products of E4M3 in a row, each some 4 % off.
        assert (one.grad.float() / 2 - other.grad.float()).norm() < 0.3 * other.grad.float().norm()


def test_cuda_graphs_replay_caught_products(made):
    torch.manual_seed(0)
    model = Products().cuda().bfloat16()
    x = torch.randn(256, 39, device="cuda", dtype=torch.bfloat16)
    with install(model, entries_of_products(made)) as handle, torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        before = handle.counts().hits["fwd"]
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert handle.counts().hits["fwd"] == before + 4
        assert torch.equal(y, model(x))
