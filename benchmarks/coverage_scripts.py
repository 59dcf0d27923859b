"""Training scripts that know nothing of the recorder, each of exactly one step.

What ``loka record`` records of them is compared with what a count sees of the same scripts run
plainly; see :mod:`coverage`.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

from coverage_models import quiet

from loka_toolkit.artifacts.trace import Trace

DEEPCTR_DCN = """
import numpy as np
from deepctr_torch.inputs import DenseFeat, SparseFeat
from deepctr_torch.models import DCN

rng = np.random.default_rng(0)
rows = 48
features = {f"C{i}": rng.integers(0, 11, rows) for i in range(3)}
features |= {f"I{i}": rng.lognormal(0, 2, rows).astype("float32") for i in range(2)}
labels = rng.integers(0, 2, rows).astype("float32")
columns = [SparseFeat(f"C{i}", 11, embedding_dim=4) for i in range(3)]
columns += [DenseFeat(f"I{i}", 1) for i in range(2)]
model = DCN(columns, columns, cross_num=2, dnn_hidden_units=(16, 8), seed=7)
model.compile("adam", "binary_crossentropy", metrics=["auc"])
model.fit(features, labels, batch_size=rows, epochs=1, verbose=0)
"""

RECHUB_DCNV2 = """
import numpy as np
from torch_rechub.basic.features import DenseFeature, SparseFeature
from torch_rechub.models.ranking import DCNv2
from torch_rechub.trainers import CTRTrainer
from torch_rechub.utils.data import DataGenerator

rng = np.random.default_rng(0)
x = {f"C{i}": rng.integers(0, 11, 40) for i in range(3)} | {"I0": rng.lognormal(0, 2, 40)}
y = rng.integers(0, 2, 40)
features = [SparseFeature(f"C{i}", vocab_size=11, embed_dim=4) for i in range(3)]
model = DCNv2([*features, DenseFeature("I0")], n_cross_layers=2,
              mlp_params={"dims": [16, 8], "dropout": 0.2, "activation": "relu"})
loader, _, _ = DataGenerator(x, y).generate_dataloader(split_ratio=[0.8, 0.1], batch_size=32)
CTRTrainer(model, n_epoch=1, model_path=".").fit(loader)
"""

TORCHFM_AUTOINT = """
import torch
from torchfm.model.afi import AutomaticFeatureInteractionModel

torch.manual_seed(0)
fields, clicks = torch.randint(0, 11, (32, 3)), torch.randint(0, 2, (32,)).float()
model = AutomaticFeatureInteractionModel([11] * 3, 8, 16, 2, 2, (16,), (0.1, 0.1, 0.1))
optimizer = torch.optim.Adam(model.parameters())
torch.nn.BCELoss()(model(fields), clicks).backward()
optimizer.step()
"""

SCRIPTS: dict[str, tuple[str, str]] = {
    "DCN, `fit`": ("deepctr-torch", DEEPCTR_DCN),
    "DCNv2, `CTRTrainer`": ("torch-rechub", RECHUB_DCNV2),
    "AutoInt, a bare loop": ("torchfm", TORCHFM_AUTOINT),
}
"""Library and text by name."""


def run_plainly(script: Path) -> None:
    """Run a script in this process, in its folder, as ``__main__``."""
    before = Path.cwd()
    os.chdir(script.parent)
    try:
        with quiet():
            runpy.run_path(str(script), run_name="__main__")
    finally:
        os.chdir(before)


def run_recorded(script: Path) -> Trace:
    """Run ``loka record`` on a script, in a process of its own, and return the trace.

    Raises:
        RuntimeError: If it fails.
    """
    command = [sys.executable, "-m", "loka_toolkit.cli", "record", "--first", "1", "--every", "0"]
    command += ["--recipe", "e4m3/tensorwise/fast", "-o", "run", script.name]
    root = str(Path(__file__).resolve().parents[1])
    known = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([root, known] if known else [root])
    done = subprocess.run(
        command,
        cwd=script.parent,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"loka record {script.name} ended with {done.returncode}: {done.stderr}")
    return Trace.open(script.parent / "run")
