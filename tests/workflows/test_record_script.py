"""Unmodified scripts, run in this process: what they see, how they end, where the traces lie."""

from __future__ import annotations

import os
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.errors import ArtifactExistsError, ConfigurationError, NoMatchError
from loka_toolkit.recording import Schedule, record

pytestmark = pytest.mark.usefixtures("untouched")


def test_the_trace_is_that_of_the_context_manager_and_the_weights_are_untouched(
    run, tmp_path, one_model, prelude
):
    ran = run(one_model, recipes=("e4m3/tensorwise/fast", "e5m2/rowwise/fast"))
    assert ran.summary.exit_code == 0
    assert [model.name for model in ran.summary.models] == ["model"]

    def alone(recorded: bool) -> nn.Module:
        """Train by hand, as the script does."""
        scope: dict[str, Any] = {}
        exec(prelude, scope)
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


def test_the_script_sees_what_python_would_show_it(run, tmp_path, one_model):
    (tmp_path / "beside.py").write_text("value = 39\n")
    ran = run(
        one_model
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform cannot fork")
def test_a_fork_that_trains_on_and_a_change_of_directory_leave_the_trace_alone(
    run, tmp_path, one_model
):
    ran = run(
        one_model
        + f"""
import os, warnings
os.mkdir({str(tmp_path / "elsewhere")!r})
home = os.getcwd()
os.chdir({str(tmp_path / "elsewhere")!r})
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
    child = os.fork()
for step in range(2 if child else 5):
    optimizer.zero_grad()
    loss_of(model(batch())).backward()
    optimizer.step()
if child == 0:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
os.chdir(home)
"""
    )
    assert ran.summary.exit_code == 0
    assert ran.steps() == 6
    assert list((tmp_path / "elsewhere").iterdir()) == []


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


def test_a_failing_script_leaves_its_traceback_and_what_was_recorded(run, capsys, one_model):
    ran = run(one_model + "raise LookupError('of the script')\n")
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
def test_exit_codes(run, capsys, ending, code, complaint, one_model):
    summary = run(one_model + "import sys\n" + ending + "\n").summary
    assert summary.exit_code == code
    if complaint is not None:
        assert complaint in summary.complaints[0]
    assert ("in words" in capsys.readouterr().err) == ("words" in ending)


def test_recorders_and_launchers_inside_are_refused(run, tmp_path, one_model):
    ran = run(
        one_model
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


def test_what_is_wrong_is_said_before_training(run, tmp_path, one_model):
    marker = tmp_path / "ran"
    touch = f"open({str(marker)!r}, 'w').close()\n"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("keep me")
    with pytest.raises(ArtifactExistsError, match="--force"):
        run(touch + one_model)
    with pytest.raises(ConfigurationError, match="e4m3"):
        run(touch + one_model, recipes=("e4m3/tensorwize/fast",), force=True)
    assert not marker.exists()
    # A pattern can only be judged once there is a model, but before it has made a step.
    with pytest.raises(NoMatchError, match="no module matches 'haed'"):
        run(one_model + touch, include=("haed",), force=True)
    assert not marker.exists()
    ran = run(one_model, include=("2",), force=True)
    assert set(ran.roles()) == {"2"}
    assert (tmp_path / "run" / "mine.txt").read_text() == "keep me"


def test_forced_over_several_a_single_trace_leaves_no_other(run, one_model):
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
    ran = run(one_model, force=True)
    assert ran.steps() == 4
    assert not (ran.out / "a").exists() and not (ran.out / "b").exists()
