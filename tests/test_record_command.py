"""``loka record`` as users run it: in a process of its own, on scripts that know nothing of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loka_toolkit.artifacts.trace import Trace

ROOT = Path(__file__).resolve().parents[1]
LOKA = (sys.executable, "-m", "loka_toolkit.cli", "record")
FAST = ("--recipe", "e4m3/tensorwise/fast", "--first", "2", "--every", "0")


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(),
        timeout=200,
    )


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


DEEPCTR = """
import numpy as np
import torch
from deepctr_torch.inputs import DenseFeat, SparseFeat
from deepctr_torch.models import DCN

rng = np.random.default_rng(0)
rows = 96
features = {f"C{i}": rng.integers(0, 11, rows) for i in range(3)}
features |= {f"I{i}": rng.lognormal(0, 2, rows).astype("float32") for i in range(2)}
labels = rng.integers(0, 2, rows).astype("float32")
columns = [SparseFeat(f"C{i}", 11, embedding_dim=4) for i in range(3)]
columns += [DenseFeat(f"I{i}", 1) for i in range(2)]
model = DCN(columns, columns, cross_num=2, dnn_hidden_units=(16, 8), dnn_dropout=0.2, seed=7)
model.compile("adam", "binary_crossentropy", metrics=["auc"])
torch.manual_seed(1)
model.fit(features, labels, batch_size=32, epochs=2, verbose=0)
torch.save(model.state_dict(), "weights.pt")
"""


def test_fit_of_deepctr_torch_is_recorded_and_trains_to_the_same_bits(tmp_path):
    pytest.importorskip("deepctr_torch")
    weights = []
    for name, launcher in (("plain", (sys.executable,)), ("recorded", (*LOKA, *FAST))):
        (folder := tmp_path / name).mkdir()
        (folder / "train.py").write_text(DEEPCTR)
        result = run(*launcher, "train.py", cwd=folder)
        assert result.returncode == 0, result.stderr
        weights.append(torch.load(folder / "weights.pt", weights_only=True))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert "steps      6 seen, 2 recorded" in result.stderr
    trace = Trace.open(tmp_path / "recorded" / "loka-run")
    steps = trace.steps.to_pandas()
    assert list(steps.gemm_flops_unseen) == [0.0, 0.0]
    sites = set(trace.sites["site"].to_pylist())
    assert {"dnn.linears.0#0:wgrad", "dnn.linears.1#0:dgrad", "dnn_linear#0:fwd"} <= sites
    # The library sums its loss; no impact could be told if the loss had not been captured.
    assert steps.reduction.tolist() == ["sum", "sum"]
    assert steps.examples.tolist() == [32, 32]


RECHUB = """
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch_rechub.basic.features import DenseFeature, SparseFeature
from torch_rechub.models.ranking import DCNv2
from torch_rechub.trainers import CTRTrainer
from torch_rechub.utils.data import DataGenerator
from torchfm.model.afi import AutomaticFeatureInteractionModel

torch.manual_seed(0)
rng = np.random.default_rng(0)
x = {f"C{i}": rng.integers(0, 11, 96) for i in range(3)} | {"I0": rng.lognormal(0, 2, 96)}
y = rng.integers(0, 2, 96)
features = [SparseFeature(f"C{i}", vocab_size=11, embed_dim=4) for i in range(3)]
dcn = DCNv2([*features, DenseFeature("I0")], n_cross_layers=2,
            mlp_params={"dims": [16, 8], "dropout": 0.2, "activation": "relu"})
loader, _, _ = DataGenerator(x, y).generate_dataloader(split_ratio=[0.9, 0.1], batch_size=32)
CTRTrainer(dcn, n_epoch=2, model_path=".").fit(loader)

fields = torch.from_numpy(rng.integers(0, 11, (64, 3)))
target = torch.from_numpy(rng.integers(0, 2, 64)).float()
autoint = AutomaticFeatureInteractionModel([11] * 3, 8, 16, 2, 2, (16,), (0.1, 0.1, 0.1))
criterion = torch.nn.BCELoss()
optimizer = torch.optim.Adam(autoint.parameters())
for i, t in DataLoader(TensorDataset(fields, target), batch_size=32):
    optimizer.zero_grad()
    criterion(autoint(i), t).backward()
    optimizer.step()
"""


def test_a_trainer_of_torch_rechub_and_then_a_model_of_torchfm(tmp_path):
    pytest.importorskip("torch_rechub")
    pytest.importorskip("torchfm")
    (tmp_path / "train.py").write_text(RECHUB)
    result = run(*LOKA, *FAST, "-o", "both", "train.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert sorted(p.name for p in (tmp_path / "both").iterdir()) == ["autoint", "dcn"]
    for name, seen, layer in (("dcn", 6, "parallel_dnn.mlp.4"), ("autoint", 2, "attn_fc")):
        trace = Trace.open(tmp_path / "both" / name)
        assert trace.manifest.status.steps_seen == seen
        sites = set(trace.sites["site"].to_pylist())
        assert {f"{layer}#0:{role}" for role in ("fwd", "dgrad", "wgrad")} <= sites
        assert trace.steps["reduction"].to_pylist() == ["mean", "mean"]


MODULE = """
import atexit, multiprocessing, os, subprocess, sys
import torch
from torch import nn
from . import name

def work(queue):
    queue.put((__name__, "loka_toolkit" in sys.modules))

if __name__ == "__main__":
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(queue,))
    worker.start()
    print("worker", *queue.get())
    worker.join()
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    atexit.register(lambda: print("at exit", sys.modules["__main__"].__dict__ is globals()))
    net = nn.Linear(13, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        net(torch.randn(8, 13)).square().mean().backward()
        optimizer.step()
    print("argv", sys.argv[1:], name, sys.path[0] == os.getcwd(), __spec__.name)
    sys.exit(int(sys.argv[-1]))
"""


def test_a_module_with_workers_and_json_on_stdout(tmp_path):
    package = tmp_path / "train"
    package.mkdir()
    (package / "__init__.py").write_text("name = 'package'\n")
    (package / "job.py").write_text(MODULE)
    result = run(*LOKA, *FAST, "--json", "-m", "train.job", "--json", "-o", "x", "3", cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    summary = json.loads(result.stdout)
    assert summary["outcome"] == {
        "code": 3,
        "message": "exited with code 3",
        "interrupted": False,
    }
    (model,) = summary["models"]
    assert model["name"] == "net" and model["trace"]["steps_seen"] == 3
    assert "error: module train.job exited with code 3" in result.stderr
    assert "argv ['--json', '-o', 'x', '3'] package True train.job" in result.stderr
    assert "worker __mp_main__ False" in result.stderr
    assert "from a child" in result.stderr
    assert "at exit True" in result.stderr
    assert Trace.open(tmp_path / "loka-run").steps.num_rows == 2


ENDLESS = """
import torch
from torch import nn
net = nn.Linear(13, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(1_000_000):
    net(torch.randn(8, 13)).square().mean().backward()
    optimizer.step()
    if step == 3:
        print("training", flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is sent as a signal")
def test_an_interrupt_leaves_a_readable_trace(tmp_path):
    (tmp_path / "train.py").write_text(ENDLESS)
    process = subprocess.Popen(
        [*LOKA, *FAST, "train.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "training\n"
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "train.py was interrupted" in printed and "internal error" not in printed
    trace = Trace.open(tmp_path / "loka-run")
    assert trace.manifest.status.closed and trace.manifest.status.steps_seen >= 4
    assert trace.steps.num_rows == 2


def test_usage_errors_need_no_training(tmp_path):
    from typer.testing import CliRunner

    from loka_toolkit.cli import app

    runner = CliRunner()
    for arguments, words in (
        ([], "name a script"),
        (["absent.py"], "there is no script absent.py"),
        ([str(tmp_path)], "is a directory"),
        (["-m", "no_such_module_of_mine"], "no module 'no_such_module_of_mine' to run"),
    ):
        result = runner.invoke(app, ["record", "-o", str(tmp_path / "run"), *arguments])
        assert result.exit_code == 2, result.output
        assert words in result.output
    assert "--json" in runner.invoke(app, ["record", "--help"]).output
