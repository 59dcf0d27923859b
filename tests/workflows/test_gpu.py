"""Scripts on a GPU: backward runs in another thread there, and fused optimizers skip silently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loka_toolkit.artifacts.trace import Trace

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
def mlp(width):
    return nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
left, right = mlp(13), mlp(39)
fused = torch.optim.Adam(left.parameters(), fused=True)
plain = torch.optim.Adam(right.parameters())
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
for step in range(4):
    for model, optimizer, width in ((left, fused, 13), (right, plain, 39)):
        optimizer.zero_grad()
        x = torch.distributions.StudentT(2.0).sample((64, width)).cuda()
        with torch.autocast("cuda", torch.float16):
            logits = model(x)[:, 0]
        loss = F.binary_cross_entropy_with_logits(logits.float(), torch.ones(64).cuda())
        if step == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
    scaler.update()
torch.save([left.cpu().state_dict(), right.cpu().state_dict()], "weights.pt")
"""


@pytest.mark.gpu
def test_models_on_a_gpu_are_told_apart_and_skipped_steps_are_none(tmp_path):
    weights = []
    loka = ("-m", "loka_toolkit.cli", "record", "--first", "3", "--every", "0")
    for name, launcher in (("plain", ()), ("recorded", loka)):
        (folder := tmp_path / name).mkdir()
        (folder / "train.py").write_text(SCRIPT)
        result = subprocess.run(
            [sys.executable, *launcher, "train.py"],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(
                    filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
                ),
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr
        weights.append(torch.load(folder / "weights.pt", weights_only=True))
    for before, after in zip(*weights, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)
    for name in ("left", "right"):
        trace = Trace.open(tmp_path / "recorded" / "loka-run" / name)
        assert trace.manifest.status.steps_seen == 3
        steps = trace.steps.to_pandas()
        assert list(steps.status) == ["recorded"] * 3
        assert list(steps.loss_scale) == [1024.0, 512.0, 512.0]
        assert list(steps.gemm_flops_unseen) == [0.0] * 3
        errors = trace.errors.to_pandas()
        for site in ("0#0:fwd", "0#0:wgrad", "2#0:fwd", "2#0:dgrad", "2#0:wgrad"):
            assert set(errors[errors.site == site].step) == {0, 1, 2}, site
