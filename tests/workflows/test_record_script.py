"""Unmodified scripts, run in this process: which models are found, and what counts as a step."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.errors import ArtifactExistsError, ConfigurationError, NoMatchError
from loka_toolkit.recording import Schedule, record
from loka_toolkit.workflows.record_script import ScriptOptions, ScriptSummary, record_script
from loka_toolkit.workflows.script_program import Program

ONE_RECIPE = ("e4m3/tensorwise/fast",)

PRELUDE = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
def batch(rows=24, width=13):
    return torch.distributions.StudentT(2.0).sample((rows, width))
def mlp(width=13, out=1):
    return nn.Sequential(nn.Linear(width, 7), nn.ReLU(), nn.Linear(7, out))
def loss_of(logits):
    return F.binary_cross_entropy_with_logits(logits[:, 0], torch.ones(len(logits)))
"""


class Ran:
    """A script that was recorded."""

    def __init__(self, out: Path, program: Program, summary: ScriptSummary) -> None:
        self.out = out
        self.variables = vars(program.main)
        self.summary = summary

    def trace(self, name: str = "") -> Trace:
        return Trace.open(self.out / name)

    def steps(self, name: str = "") -> int:
        return self.trace(name).manifest.status.steps_seen

    def roles(self, name: str = "") -> dict[str, set[str]]:
        sites = self.trace(name).sites.to_pandas()
        return {fqn: set(rows.role) for fqn, rows in sites.groupby("fqn")}

    def events(self, name: str = "") -> set[str]:
        return {event.kind for event in self.trace(name).manifest.events}


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Check that a run leaves the process as it found it."""

    def state() -> tuple[Any, ...]:
        return (
            nn.Module.__call__,
            torch.optim.Optimizer.__init__,
            torch.amp.GradScaler.step,
            torch.autograd.backward,
            len(_global_optimizer_pre_hooks),
            len(_global_optimizer_post_hooks),
            torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
            sys.modules["__main__"],
            list(sys.argv),
            list(sys.path),
        )

    before = state()
    yield
    assert state() == before


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ran]:
    def run_text(text: str, *arguments: str, prelude: str = PRELUDE, **options: Any) -> Ran:
        script = tmp_path / "train.py"
        script.write_text(prelude + textwrap.dedent(text))
        program = Program(str(script), arguments, is_module=False)
        options.setdefault("recipes", ONE_RECIPE)
        options.setdefault("schedule", Schedule.always())
        out = tmp_path / "run"
        return Ran(out, program, record_script(program, ScriptOptions(out=out, **options)))

    return run_text


ONE_MODEL = """
model = mlp()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
for step in range(4):
    optimizer.zero_grad()
    loss_of(model(batch())).backward()
    optimizer.step()
    scheduler.step()
"""


def test_the_trace_is_that_of_the_context_manager_and_the_weights_are_untouched(run, tmp_path):
    ran = run(ONE_MODEL, recipes=("e4m3/tensorwise/fast", "e5m2/rowwise/fast"))
    assert ran.summary.exit_code == 0
    assert [model.name for model in ran.summary.models] == ["model"]

    def alone(recorded: bool) -> nn.Module:
        """Train by hand, as the script does."""
        scope: dict[str, Any] = {}
        exec(PRELUDE, scope)
        model = scope["mlp"]()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        recorder = record(
            model,
            tmp_path / "by-hand",
            schedule=Schedule.always(),
            recipes=("e4m3/tensorwise/fast", "e5m2/rowwise/fast"),
        )
        if recorded:
            recorder.__enter__()
        for _ in range(4):
            optimizer.zero_grad()
            scope["loss_of"](model(scope["batch"]())).backward()
            optimizer.step()
            if recorded:
                recorder.step()
            scheduler.step()
        if recorded:
            recorder.__exit__(None, None, None)
        return model

    alone(recorded=True)
    for table in ("sites", "errors", "operands", "moments"):
        pd.testing.assert_frame_equal(
            getattr(ran.trace(), table).to_pandas(),
            getattr(Trace.open(tmp_path / "by-hand"), table).to_pandas(),
            obj=table,
        )
    plain = alone(recorded=False).state_dict()
    trained = ran.variables["model"].state_dict()
    assert all(torch.equal(trained[name], plain[name]) for name in plain)


def test_the_script_sees_what_python_would_show_it(run, tmp_path):
    (tmp_path / "beside.py").write_text("value = 39\n")
    ran = run(
        ONE_MODEL
        + """
import pickle, sys
from beside import value
class Local:
    pass
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
assert pickle.loads(pickle.dumps(Local())).__class__ is Local
assert __spec__ is None and sys.path[0] == str(__import__("pathlib").Path(__file__).parent)
seen = sys.argv, value
""",
        "--epochs",
        "3",
        "-o",
        "mine",
    )
    argv = [str(tmp_path / "train.py"), "--epochs", "3", "-o", "mine"]
    assert ran.variables["seen"] == (argv, 39)


def test_evaluation_between_steps_and_a_dry_forward_are_no_steps(run):
    ran = run(
        """
        model = mlp()
        loss_of(model(batch())).backward()  # nobody trains it yet
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # no gradients: changes nothing
        for step in range(3):
            loss_of(model(batch())).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(batch(5))
            model.eval()
            model(batch(6))  # carelessly, with gradients
            model.train()
        """
    )
    # The step before anything was called with an optimizer counts too, and is the one not seen.
    assert (
        ran.summary.models[0].notes and "first step was not seen" in ran.summary.models[0].notes[0]
    )
    assert ran.steps() == 3
    steps = ran.trace().errors.to_pandas().groupby("step").site.unique()
    assert all({"0#0:wgrad", "2#0:dgrad"} <= set(sites) for sites in steps)
    rows = ran.trace().sites.to_pandas().query("role == 'fwd'").m
    assert set(rows) == {24}, "the careless evaluation took no step's place"


def test_alternating_models_are_told_apart_and_the_generator_takes_no_step_of_the_critic(run):
    ran = run(
        """
        def main():
            generator, critic = mlp(5, 13), mlp(13, 1)
            g = torch.optim.Adam(generator.parameters(), lr=1e-3)
            c = torch.optim.Adam(critic.parameters(), lr=1e-3)
            for step in range(6):
                c.zero_grad()
                fake = generator(batch(24, 5))
                loss_of(critic(batch(24, 13))).backward()
                loss_of(-critic(fake.detach())).backward()
                c.step()
                if step % 2:
                    g.zero_grad()
                    loss_of(critic(generator(batch(16, 5)))).backward()
                    g.step()
            return generator, critic
        main()
        """
    )
    assert sorted(model.name for model in ran.summary.models) == ["critic", "generator"]
    assert not (ran.out / "manifest.json").exists()
    assert ran.steps("critic") == 6
    assert ran.steps("generator") == 3
    critic = ran.trace("critic").sites.to_pandas()
    # Only what the critic's own optimizer used: its real batch of 24, never the generator's 16.
    assert set(critic.query("role == 'fwd'").m) == {24}
    assert ran.roles("critic") == {"0": {"fwd", "wgrad"}, "2": {"fwd", "dgrad", "wgrad"}}
    generator = ran.trace("generator").errors.to_pandas()
    assert set(ran.roles("generator")["2"]) == {"fwd", "dgrad", "wgrad"}
    assert set(generator.query("site == '0#0:wgrad'").step) == {0, 1, 2}


def test_a_critic_that_is_frozen_for_its_generator_is_found_when_it_thaws(run):
    ran = run(
        """
        generator, critic = mlp(5, 13), mlp(13, 1)
        g = torch.optim.Adam(generator.parameters(), lr=1e-3)
        c = torch.optim.Adam(critic.parameters(), lr=1e-3)
        for step in range(3):
            critic.requires_grad_(False)
            g.zero_grad()
            loss_of(critic(generator(batch(16, 5)))).backward()
            g.step()
            critic.requires_grad_(True)
            c.zero_grad()
            loss_of(critic(batch(24, 13))).backward()
            c.step()
        """
    )
    assert ran.steps("critic") == ran.steps("generator") == 3
    critic = ran.trace("critic").sites.to_pandas()
    assert set(critic.query("role == 'fwd'").m) == {24}
    errors = ran.trace("critic").errors.to_pandas()
    assert set(errors.query("site == '0#0:wgrad'").step) == {0, 1, 2}


def test_a_frozen_encoder_in_evaluation_mode_belongs_to_the_step_of_its_head(run):
    ran = run(
        """
        encoder, head = mlp(13, 5).eval(), nn.Linear(5, 1)
        optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(head(encoder(batch()))).backward()
            optimizer.step()
        """
    )
    sites = ran.trace().errors.to_pandas().groupby("step").site.unique()
    assert len(sites) == 2
    assert all({"encoder.0#0:fwd", "head#0:fwd"} <= set(found) for found in sites)


def test_only_the_model_asked_for(run):
    text = """
        a, b = mlp(), mlp(5)
        first = torch.optim.SGD(a.parameters(), lr=0.1)
        second = torch.optim.SGD(b.parameters(), lr=0.1)
        for step in range(2):
            loss_of(a(batch())).backward(); first.step(); first.zero_grad()
            loss_of(b(batch(24, 5))).backward(); second.step(); second.zero_grad()
        """
    ran = run(text, model="b")
    assert ran.steps() == 2
    assert set(ran.trace().sites.to_pandas().query("fqn == '0' and role == 'fwd'").k) == {5}
    assert ran.trace().steps["gemm_flops_unseen"].to_pylist() == [0.0, 0.0]
    notes = {model.name: model.notes for model in ran.summary.models}
    assert "--model b" in notes["a"][0]
    with pytest.raises(ConfigurationError, match=r"unknown model 'c'.*'a'|known: a, b"):
        run(text, model="c", force=True)


def test_two_optimizers_of_one_model_make_one_step_per_round(run):
    ran = run(
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(50, 8, sparse=True)
                self.dense = mlp(8)
            def forward(self, i):
                return self.dense(self.table(i))
        net = Net()
        sparse = torch.optim.SparseAdam(net.table.parameters())
        dense = torch.optim.Adam(net.dense.parameters())
        for step in range(6):
            loss_of(net(torch.randint(50, (24,)))).backward()
            dense.step()
            if step % 3 == 0:  # the other one steps now and then
                sparse.step()
            sparse.zero_grad(); dense.zero_grad()
        """
    )
    assert [model.name for model in ran.summary.models] == ["net"]
    assert ran.steps() == 6
    assert ran.trace().steps["status"].to_pylist() == ["recorded"] * 6


def test_modules_of_one_optimizer_are_one_model_under_their_names(run):
    ran = run(
        """
        encoder, head = mlp(13, 5), nn.Linear(5, 1)
        optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(head(encoder(batch()))).backward()
            optimizer.step()
        """
    )
    assert ran.steps() == 2
    assert ran.roles() == {
        "encoder.0": {"fwd", "wgrad"},
        "encoder.2": {"fwd", "dgrad", "wgrad"},
        "head": {"fwd", "dgrad", "wgrad"},
    }
    assert set(ran.trace().steps["gemm_flops_unseen"].to_pylist()) == {0.0}


def test_a_model_that_is_called_by_its_forward_method_only(run):
    ran = run(
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.weight = mlp(13, 5), nn.Parameter(torch.randn(5, 1))
            def forward(self, x):
                return self.body(x) @ self.weight
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(net.forward(batch())).backward()
            optimizer.step()
        """
    )
    assert [model.type for model in ran.summary.models] == ["Net"]
    assert set(ran.roles()) == {"body.0", "body.2", "(root)"}
    assert ran.steps() == 2


def test_a_gradient_scaler_skips_no_step_into_the_count(run):
    ran = run(
        """
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(batch(24 + step)).exp().log().square().mean()  # of no known kind
            if step == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """
    )
    assert ran.steps() == 3
    assert ran.trace().steps["loss_scale"].to_pylist() == [1024.0, 512.0, 512.0]
    errors = ran.trace().errors.to_pandas()
    assert set(errors.query("site == '0#0:wgrad'").step) == {0, 1, 2}
    # The skipped step's forward, of 25 rows, is dropped with its gradients.
    assert 25 not in set(ran.trace().sites.to_pandas().query("role == 'fwd'").m)


def test_closures_wrappers_and_inherited_steps_count_once(run):
    ran = run(
        """
        class Wrapped(torch.optim.SGD):
            def step(self, closure=None):
                return super().step(closure)
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # hooks SGD.step as well
        model, other = mlp(), mlp(5)
        lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)
        wrapped = Wrapped(other.parameters(), lr=0.1)
        x, y = batch(), batch(24, 5)
        def closure():
            lbfgs.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            return loss
        for step in range(2):
            lbfgs.step(closure)
        for step in range(3):
            wrapped.zero_grad()
            loss_of(other(y)).backward()
            wrapped.step()
        """
    )
    assert {m.name: m.trace.steps_seen for m in ran.summary.models} == {"model": 2, "other": 3}


def test_optimizers_that_step_inside_of_backward(run):
    ran = run(
        """
        model = mlp()
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            loss_of(model(batch())).backward()
        """
    )
    assert ran.steps() == 3
    errors = ran.trace().errors.to_pandas()
    assert set(errors.query("site == '0#0:wgrad'").step) == {0, 1, 2}


def test_a_compiled_model_and_one_whose_training_step_is_compiled(run):
    ran = run(
        """
        model, other = mlp(), mlp(5)
        fast = torch.compile(model, backend="eager")
        @torch.compile(backend="eager")
        def loss_of_other(x):
            return loss_of(other(x))
        first = torch.optim.SGD(model.parameters(), lr=0.1)
        second = torch.optim.SGD(other.parameters(), lr=0.1)
        for step in range(3):
            first.zero_grad(); second.zero_grad()
            loss_of(fast(batch())).backward()
            first.step()
            loss_of_other(batch(24, 5)).backward()
            second.step()
        torch.compiler.reset()
        """
    )
    found = {model.name: model for model in ran.summary.models}
    assert ran.steps("fast") == 3
    assert "compiled-model" in ran.events("fast")
    assert found["fast"].notes == ()
    assert ran.steps("other") in (2, 3)
    if ran.steps("other") == 2:
        assert "first step was not seen" in found["other"].notes[0]


def test_workers_of_a_loader_leave_the_trace_alone(run):
    ran = run(
        """
        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 16
            def __getitem__(self, index):
                return torch.full((13,), float(index)) @ torch.eye(13)
        if __name__ == "__main__":
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = torch.utils.data.DataLoader(
                Rows(), batch_size=8, num_workers=1, multiprocessing_context="fork"
            )
            for _ in range(2):
                for x in loader:
                    optimizer.zero_grad()
                    loss_of(model(x)).backward()
                    optimizer.step()
        """
    )
    assert ran.steps() == 4
    assert set(ran.roles()) == {"0", "2"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("print('nothing to train')", "no torch.nn.Module with parameters was called"),
        ("model = mlp()\nfor _ in range(2): loss_of(model(batch())).backward()", "no torch.optim"),
        (
            "w = nn.Parameter(torch.ones(13, 1))\no = torch.optim.SGD([w], lr=0.1)\n"
            "loss_of(batch() @ w).backward()\no.step()",
            "hold no parameter of a torch.nn.Module",
        ),
        (
            "model = mlp()\no = torch.optim.SGD(model.parameters())\nloss_of(model(batch()))",
            "no optimizer stepped",
        ),
    ],
)
def test_a_script_that_trains_nothing_is_an_error_that_says_why(run, text, why):
    summary = run(text).summary
    assert summary.exit_code == 1
    assert why in summary.complaints[0] and "train.py" in summary.complaints[0]


def test_a_failing_script_leaves_its_traceback_and_what_was_recorded(run, capsys):
    ran = run(ONE_MODEL + "raise LookupError('of the script')\n")
    assert ran.summary.exit_code == 1
    assert ran.summary.complaints == [f"{ran.out.parent / 'train.py'} raised LookupError"]
    printed = capsys.readouterr().err
    assert "LookupError: of the script" in printed
    assert "loka_toolkit" not in printed, "the traceback begins in the script"
    assert ran.steps() == 4 and ran.trace().manifest.status.closed


@pytest.mark.parametrize(
    ("ending", "code", "complaint"),
    [
        ("sys.exit()", 0, None),
        ("sys.exit(0)", 0, None),
        ("sys.exit(7)", 1, "exited with code 7"),
        ("sys.exit('in words')", 1, "exited with code 1"),
        ("raise KeyboardInterrupt", 130, "was interrupted"),
        ("def broken(:", 1, "raised SyntaxError"),
    ],
)
def test_exit_codes(run, capsys, ending, code, complaint):
    summary = run(ONE_MODEL + "import sys\n" + ending + "\n").summary
    assert summary.exit_code == code
    if complaint is not None:
        assert complaint in summary.complaints[0]
    assert ("in words" in capsys.readouterr().err) == ("words" in ending)


def test_recorders_and_launchers_inside_are_refused(run, tmp_path):
    ran = run(
        ONE_MODEL
        + f"""
import loka_toolkit
from loka_toolkit.errors import ConfigurationError
from loka_toolkit.workflows.record_script import ScriptOptions, record_script
from loka_toolkit.workflows.script_program import Program
from pathlib import Path
refusals = []
for attempt in (
    lambda: loka_toolkit.record(nn.Linear(3, 2), {str(tmp_path / "own")!r}).__enter__(),
    lambda: record_script(Program(__file__, [], is_module=False), ScriptOptions(Path("other"))),
):
    try:
        attempt()
    except ConfigurationError as error:
        refusals.append(str(error))
"""
    )
    own, second = ran.variables["refusals"]
    assert "runs under `loka record`" in own and "take record() out" in own
    assert "inside of `loka record` already" in second
    assert not (tmp_path / "own").exists()
    assert ran.steps() == 4


def test_what_is_wrong_is_said_before_training(run, tmp_path):
    marker = tmp_path / "ran"
    touch = f"open({str(marker)!r}, 'w').close()\n"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("keep me")
    with pytest.raises(ArtifactExistsError, match="--force"):
        run(touch + ONE_MODEL)
    with pytest.raises(ConfigurationError, match="e4m3"):
        run(touch + ONE_MODEL, recipes=("e4m3/tensorwize/fast",), force=True)
    assert not marker.exists()
    # A pattern can only be judged once there is a model, but before it has made a step.
    with pytest.raises(NoMatchError, match="no module matches 'haed'"):
        run(ONE_MODEL + touch, include=("haed",), force=True)
    assert not marker.exists()
    ran = run(ONE_MODEL, include=("2",), force=True)
    assert set(ran.roles()) == {"2"}
    assert (tmp_path / "run" / "mine.txt").read_text() == "keep me"


def test_forced_over_several_a_single_trace_leaves_no_other(run):
    several = """
        a, b = mlp(), mlp(5)
        first = torch.optim.SGD(a.parameters(), lr=0.1)
        loss_of(a(batch())).backward(); first.step()
        second = torch.optim.SGD(b.parameters(), lr=0.1)  # found when the first lies in RUN itself
        loss_of(b(batch(24, 5))).backward(); second.step()
        """
    ran = run(several)
    assert sorted(p.name for p in ran.out.iterdir()) == ["a", "b"]
    assert ran.steps("a") == ran.steps("b") == 1
    ran = run(ONE_MODEL, force=True)
    assert ran.steps() == 4
    assert not (ran.out / "a").exists() and not (ran.out / "b").exists()
