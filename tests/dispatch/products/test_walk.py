"""The whole way of a model that multiplies otherwise than by nn.Linear: record to training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loka_toolkit.analysis import analyze
from loka_toolkit.artifacts.dispatch_table import MissReason
from loka_toolkit.dispatch import build_table, check_table, install
from loka_toolkit.harness import replay
from loka_toolkit.recording import Schedule, record

RECIPE = "e4m3/tensorwise/fp32"
BATCH, FIELDS, STEPS = 64, 4, 30


class Interactions(nn.Module):
    """The products of every pair of fields."""

    def forward(self, fields):
        pairs = torch.bmm(fields, fields.mT)
        row, column = torch.triu_indices(FIELDS, FIELDS, 1)
        return pairs[:, row, column]


class ClickModel(nn.Module):
    """Embeddings, deepctr's cross network with one parameter of three dimensions, interactions."""

    def __init__(self):
        from deepctr_torch.layers.interaction import CrossNet

        super().__init__()
        self.items = nn.Embedding(150, 6)
        self.cross = CrossNet(6 * FIELDS, layer_num=2, parameterization="matrix")
        self.pairs = Interactions()
        self.head = nn.Linear(6 * FIELDS + 6, 1)

    def forward(self, items):
        fields = self.items(items)
        return self.head(torch.cat([self.cross(fields.flatten(1)), self.pairs(fields)], 1))


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    taste = torch.randn(150, generator=torch.Generator().manual_seed(9))
    while True:
        items = torch.randint(150, (BATCH, FIELDS), generator=generator)
        yield items, torch.bernoulli(taste[items].sum(1).sigmoid(), generator=generator)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    torch.manual_seed(0)
    model = ClickModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(items, clicks):
        loss = F.binary_cross_entropy_with_logits(model(items).squeeze(1), clicks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    data = batches(1)
    for _ in range(100):
        step(*next(data))
    path = tmp_path_factory.mktemp("walk") / "trace"
    with record(model, path, schedule=Schedule.always(), recipes=[RECIPE]) as recorder:
        for _ in range(STEPS):
            step(*next(data))
            recorder.step()
    return model, step, data, path


def test_from_a_record_to_training_in_fp8(trained):
    model, step, data, path = trained
    safety = analyze(path, chains=2, tune=300, draws=1000)
    wanted = [f"torch.scaled_mm/{RECIPE}", "torch.matmul/fp32"]
    results = replay(path, candidates=wanted, draws=1, isolate=False)
    table = build_table(safety, results, chip="cpu")
    recorded = {cell.site for cell in safety.cells}
    accounted = {f"{e.fqn}#{e.call}:{e.role}".replace("*", "0") for e in table.entries}
    accounted |= {f"{m.fqn}#{m.call}:{m.role}" for m in table.misses}
    assert accounted == recorded and len(recorded) == 2 * 3 + 3 + 3
    assert all(miss.detail for miss in table.misses)
    assert MissReason.NOT_REPLACEABLE not in {miss.reason for miss in table.misses}
    caught = {(e.fqn, e.call, e.role) for e in table.entries if e.fqn != "head"}
    assert {("cross", 0, "fwd"), ("cross", 1, "wgrad"), ("pairs", 0, "grad_b")} <= caught
    assert check_table(table, model).usable
    with install(model, table) as installation:
        losses = [step(*next(data)) for _ in range(10)]
        counts = installation.counts()
        sites = installation.counts_by_site()
    assert not counts.misses, "every product that runs has an entry or a miss that says why"
    entries = len(table.entries)
    assert sum(counts.hits.values()) == 10 * entries
    assert {s.fqn for s in sites if s.hits} >= {"cross", "pairs"}
    assert all(0.3 < loss < 1.0 for loss in losses)
