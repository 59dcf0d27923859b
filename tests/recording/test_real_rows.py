"""A third-party model on real rows: deepctr-torch DCN with raw counts and a summed loss."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.datasets.criteo import CATEGORY_COLUMNS, DENSE_COLUMNS, read_criteo
from loka_toolkit.numerics.emulation import emulate
from loka_toolkit.numerics.recipes import DEFAULT_RECIPE_NAMES, parse_recipe
from loka_toolkit.recording import Schedule, record

SHARED = Path(os.environ.get("LOKA_SHARED_DATA", Path(__file__).parents[3] / "shared"))
CRITEO = SHARED / "data" / "criteo_sample_200.csv"
DYNAMIC = tuple(name for name in DEFAULT_RECIPE_NAMES if "static" not in name)

pytestmark = [
    pytest.mark.skipif(not CRITEO.is_file(), reason=f"no Criteo rows at {CRITEO}"),
    pytest.mark.filterwarnings("ignore"),
]


class Products(TorchDispatchMode):
    """Sees operands of products in order, and adds t times an error to one output."""

    def __init__(self, index: int = -1, error: torch.Tensor | None = None, t: float = 0.0):
        super().__init__()
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.index, self.error, self.t = index, error, t
        self.logits = torch.empty(0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1]
        if name == "sigmoid":
            self.logits = args[0].reshape(-1).clone()
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            a, b = args[-2:]
            if len(self.seen) == self.index:
                out = out + self.t * self.error
            self.seen.append((a.clone(), b.clone()))
        return out


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Iterator[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = pytest.importorskip("deepctr_torch.inputs")
        models = pytest.importorskip("deepctr_torch.models")
    rows = read_criteo(CRITEO)
    index, sizes = rows.encoded_categories()
    columns = [
        inputs.SparseFeat(name, size, embedding_dim=4)
        for name, size in zip(CATEGORY_COLUMNS, sizes, strict=True)
    ] + [inputs.DenseFeat(name, 1) for name in DENSE_COLUMNS]
    x = dict(zip(CATEGORY_COLUMNS, index.T, strict=True))
    x |= dict(zip(DENSE_COLUMNS, np.nan_to_num(rows.dense).T, strict=True))
    model = models.DCN(columns, columns, task="binary", l2_reg_embedding=1e-5, seed=1024)
    model.compile("adam", "binary_crossentropy")
    model.fit(x, rows.labels, batch_size=50, epochs=15, verbose=0)
    before = copy.deepcopy(model)
    path = tmp_path_factory.mktemp("real") / "run"
    with record(model, path, schedule=Schedule.always(), recipes=DYNAMIC) as recorder:
        hook = model.optim.register_step_post_hook(lambda *_: recorder.step())
        model.fit(x, rows.labels, batch_size=200, epochs=1, verbose=0, shuffle=False)
        hook.remove()
    features = np.concatenate([x[n].reshape(-1, 1) for n in model.feature_index], axis=1)
    yield {
        "trace": Trace.open(path),
        "before": before,
        "x": torch.from_numpy(features.astype(np.float32)),
        "y": torch.from_numpy(rows.labels),
    }


def test_loss_is_read_as_a_sum_without_its_regularizer(recorded):
    step = recorded["trace"].steps.to_pylist()[0]
    assert (step["reduction"], step["examples"], step["status"]) == ("sum", 200, "recorded")
    assert step["loss_scale"] == 1.0
    assert step["gemm_flops_unseen"] == 0 and step["unseen_reason"] is None
    with torch.no_grad():
        p = recorded["before"](recorded["x"]).squeeze(-1)
    expected = float(F.binary_cross_entropy(p, recorded["y"]))
    assert step["mean_loss"] == pytest.approx(expected, rel=1e-5)
    assert step["loss"] > 200 * step["mean_loss"]  # the regularizer


def test_predicted_impact_is_the_directional_derivative(recorded, record_property):
    trace, before, x, y = (recorded[k] for k in ("trace", "before", "x", "y"))
    double = copy.deepcopy(before).double()
    with torch.no_grad(), Products() as products:
        before(x)
    forward = [row["site"] for row in trace.sites.to_pylist() if row["role"] == "fwd"]
    assert len(forward) == len(products.seen) == 8

    def loss(index: int, error: torch.Tensor, t: float) -> float:
        with torch.no_grad(), Products(index, error, t) as products:
            double(x.double())
        # From the logits: log(1 - p) is a staircase in float64 from a logit of 30 on. At 36.7 p
        # rounds to 1, and binary_cross_entropy clamps the logarithm at -100.
        z = products.logits
        positive = F.softplus(-z).clamp(max=100)
        negative = torch.where(torch.sigmoid(z) == 1, 100.0, F.softplus(z))
        return float((y.double() * positive + (1 - y.double()) * negative).mean())

    errors = {(r["site"], r["recipe"]): r for r in trace.errors.to_pylist()}
    checked, worst, closer, within = 0, 0.0, 0, 0
    for index, site in enumerate(forward):
        a, b = products.seen[index]
        for name in DYNAMIC:
            row = errors[site, name]
            error = emulate(a, b, parse_recipe(name)).double() - a.double() @ b.double()
            slopes = [
                (loss(index, error, t) - loss(index, error, -t)) / (2 * t) for t in (2e-3, 5e-4)
            ]
            # ReLUs and clamps have kinks: two step widths show whether one was crossed.
            noise = max(abs(slopes[0] - slopes[1]), row["impact_standard_error"], 1e-10)
            if abs(slopes[0]) <= 3 * noise:
                continue
            checked += 1
            deviation = abs(row["impact_first_order"] / slopes[0] - 1)
            worst = max(worst, deviation)
            assert deviation < 0.10, (site, name, row["impact_first_order"], slopes)
            both = row["impact_first_order"] + row["impact_second_order"]
            if site == "linear_model#0:fwd":
                # The logit is linear in this site's error: only third order is left out.
                replaced = loss(index, error, 1.0) - loss(index, error, 0.0)
                assert both == pytest.approx(replaced, rel=0.02), name
                closer += abs(both - replaced) < abs(row["impact_first_order"] - replaced)
            if row["impact_status"] == "ok":
                within += 1
                replaced = loss(index, error, 1.0) - loss(index, error, 0.0)
                # 1e-6 is a ten-thousandth of the 0.02 % budget of this loss: ReLUs that flip.
                assert both == pytest.approx(replaced, rel=0.25, abs=1e-6), (site, name)
    print(
        f"{checked} of {len(forward) * len(DYNAMIC)} checked, worst deviation {worst:.2%}; "
        f"{within} within validity, second order brought {closer} of 5 linear sites closer"
    )
    assert checked >= 20 and closer == 5


def test_the_input_layer_loses_its_embeddings_tensorwise(recorded):
    rows = recorded["trace"].errors.to_pylist()
    row = next(
        r
        for r in rows
        if r["site"] == "dnn.linears.0#0:fwd" and r["recipe"] == "e4m3/tensorwise/fast"
    )
    assert row["sqnr_db"] > 25, "the tensor as a whole looks good"
    assert row["underflow_share_worst_group"] == 1.0
    assert row["underflow_worst_group"].startswith("x[")


def test_saturation_is_told(recorded):
    events = {event.kind: event.message for event in recorded["trace"].manifest.events}
    assert "backward pass of their own" in events["saturated-examples"]
    statuses = {
        r["impact_status"]
        for r in recorded["trace"].errors.to_pylist()
        if r["site"].endswith("fwd")
    }
    assert "beyond-validity" in statuses and "unknown" not in statuses
