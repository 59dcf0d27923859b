"""Models under torch.compile: recorded steps run eagerly, all others as they were compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.recording import Schedule, record
from loka_toolkit.recording.eager import EagerStance

# Raised while the compiler looks at a tensor that is no leaf; it means nothing here.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

SITES = {"0#0:fwd", "0#0:wgrad", "2#0:fwd", "2#0:dgrad", "2#0:wgrad"}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Layers(nn.Sequential):
    """PyTorch compiles no module in place whose forward is its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


def layers() -> nn.Module:
    torch.manual_seed(0)
    return Layers(nn.Linear(13, 7), nn.ReLU(), nn.Linear(7, 1))


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def part(model: nn.Module) -> nn.Module:
    model[2] = torch.compile(model[2], backend="aot_eager")
    return model


def is_compiled(loss: torch.Tensor) -> bool:
    """Whether a graph holds the node of a compiled function."""
    pending, seen = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CompiledFunction" in node.name():
            return True
        pending.extend(following for following, _ in node.next_functions)
    return False


@pytest.mark.parametrize("compiled", [whole, in_place, part])
@pytest.mark.parametrize("is_warm", [True, False], ids=["compiled before", "compiled later"])
def test_recorded_steps_see_all_sites_and_others_stay_compiled(tmp_path, compiled, is_warm):
    model = compiled(layers())
    x = torch.randn(5, 13)
    if is_warm:
        model(x).square().mean().backward()
    ran_compiled, compilations = [], []
    schedule = Schedule(warm_steps=1, every=3)
    with record(model, tmp_path / "run", schedule=schedule) as recorder:
        for _ in range(8):
            loss = model(x).square().mean()
            loss.backward()
            recorder.step()
            ran_compiled.append(is_compiled(loss))
            compilations.append(counters["stats"]["unique_graphs"])
    trace = Trace.open(tmp_path / "run")
    recorded = set(trace.steps["step"].to_pylist())
    assert recorded == {0, 1, 4, 7}
    assert ran_compiled == [step not in recorded for step in range(8)]
    assert compilations[-1] == 1, "compiled once, whatever was recorded between"
    assert set(trace.sites["site"].to_pylist()) == SITES
    assert set(trace.sites["weight"].to_pylist()) == {"0.weight", "2.weight"}
    assert trace.steps["gemm_flops_unseen"].to_pylist() == [0.0] * 4
    event = {e.kind: e for e in trace.manifest.events}["compiled-model"]
    assert "eagerly" in event.message
    assert is_compiled(model(x).square().mean())
    assert counters["stats"]["unique_graphs"] == 1


def test_a_compiled_function_that_is_no_module_is_told_too(tmp_path):
    model = nn.Linear(13, 7)

    @torch.compile(backend="aot_eager")
    def gram(h: torch.Tensor) -> torch.Tensor:
        return (h @ h.mT).square().mean()

    x = torch.randn(5, 13)
    gram(model(x)).backward()
    with record(model, tmp_path / "run", schedule=Schedule.always()) as recorder:
        gram(model(x)).backward()
        recorder.step()
    trace = Trace.open(tmp_path / "run")
    roles = {(s["fqn"], s["role"]) for s in trace.sites.to_pylist()}
    assert len(roles) == 4 and trace.errors.num_rows
    assert "compiled-code" in {e.kind for e in trace.manifest.events}
    assert is_compiled(gram(model(x)))


def test_a_compiled_backward_of_an_earlier_forward_is_named(tmp_path):
    """The forward ran before the recorded step began: its products cannot be attributed."""
    model = whole(layers())
    x = torch.randn(5, 13)
    early = model(x).square().mean()
    with record(model, tmp_path / "run", schedule=Schedule.always()) as recorder:
        early.backward()
        model(x).square().mean().backward()
        recorder.step()
    row = Trace.open(tmp_path / "run").steps.to_pylist()[0]
    assert "backward of a compiled graph" in row["unseen_reason"]
    # Two weight gradients and one input gradient.
    assert row["gemm_flops_unseen"] == 2.0 * 5 * (13 * 7 + 2 * 7)


def test_the_stance_of_the_user_comes_back():
    model = whole(layers())
    x = torch.randn(5, 13)
    with torch.compiler.set_stance("fail_on_recompile"):
        one, other = EagerStance(), EagerStance()
        one.install()
        other.install()
        assert not is_compiled(model(x).sum())
        one.remove()
        assert not is_compiled(model(x).sum()), "another recorder still needs it"
        other.remove()
        other.remove()
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            model(x)
    assert is_compiled(model(x).sum())
