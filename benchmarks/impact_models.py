"""Small click models of every kind of loss, trained on a generated log with planted signal.

Fresh rows come with what the generator knows (the click probability, the expected target), so the
expectation of a loss over its label is taken exactly and only the rows are sampled.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from loka_toolkit.datasets.click_log import ClickLog, ClickLogSpec
from loka_toolkit.recording import Schedule, record
from loka_toolkit.workflows.two_tower import TensorBatch, TwoTower

SPEC = ClickLogSpec(user_cardinalities=(2000, 300, 100, 20), item_cardinalities=(1000, 200, 60, 12))
CARDINALITIES = (*SPEC.user_cardinalities, *SPEC.item_cardinalities)
COUNTS = SPEC.user_counts + SPEC.item_counts
CLASSES = 10
POOL = 1 << 16
"""Rows drawn at a time."""
RECIPES = (
    "e4m3/tensorwise/fp32",
    "e4m3/rowwise/fp32",
    "e4m3/static/fp32",
    "e5m2/tensorwise/fp32",
    "e5m2/rowwise/fp32",
    "e5m2/static/fp32",
    "e4m3-e5m2/tensorwise/fp32",
)
NOISE_SD = 0.7
"""Standard deviation of a squared-error target around its expectation."""
LOG = ClickLog(SPEC, seed=3)
_CLASS_EFFECTS = np.random.default_rng(4).normal(0.0, 0.8, (SPEC.user_cardinalities[0], CLASSES))


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of the log as tensors.

    Attributes:
        counts: [rows, COUNTS], raw.
        ids: int64 [rows, vocabularies].
        y: Labels as the training sees them.
        expected: What the generator knows of them: probability, class probabilities or mean.
    """

    counts: torch.Tensor
    ids: torch.Tensor
    y: torch.Tensor
    expected: torch.Tensor

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.counts)

    def part(self, start: int, stop: int) -> Rows:
        """Return some of the rows."""
        whole = slice(start, stop)
        return Rows(self.counts[whole], self.ids[whole], self.y[whole], self.expected[whole])

    def double(self) -> Rows:
        """Return the rows with float64 counts and real labels."""
        y = self.y.double() if self.y.is_floating_point() else self.y
        return dataclasses.replace(self, counts=self.counts.double(), y=y)


def click_rows(rows: int, seed: int) -> Rows:
    """Draw rows with clicks."""
    batch = LOG.batch(rows, seed)
    return Rows(
        counts=torch.from_numpy(np.concatenate([batch.user_counts, batch.item_counts], axis=1)),
        ids=torch.from_numpy(np.concatenate([batch.user_categories, batch.item_categories], 1)),
        y=torch.from_numpy(batch.clicks),
        expected=torch.from_numpy(batch.probability),
    )


def class_rows(rows: int, seed: int) -> Rows:
    """Draw rows with one of CLASSES labels: the item clicked among ten shown."""
    drawn = click_rows(rows, seed)
    z = torch.from_numpy(_CLASS_EFFECTS)[drawn.ids[:, 0]]
    z = z + 0.3 * torch.log1p(drawn.counts[:, :CLASSES].double()) - 0.5
    p = torch.softmax(z, 1)
    generator = torch.Generator().manual_seed(seed + 17)
    y = torch.multinomial(p, 1, generator=generator).squeeze(1)
    return dataclasses.replace(drawn, y=y, expected=p)


def value_rows(rows: int, seed: int) -> Rows:
    """Draw rows with a real target: the planted logit with noise."""
    drawn = click_rows(rows, seed)
    mean = torch.logit(drawn.expected)
    noise = torch.randn(rows, generator=torch.Generator().manual_seed(seed + 17))
    return dataclasses.replace(drawn, y=mean.float() + NOISE_SD * noise, expected=mean)


def task_rows(rows: int, seed: int) -> Rows:
    """Draw rows with three binary labels: click, and two of other base rates."""
    drawn = click_rows(rows, seed)
    p = torch.sigmoid(torch.logit(drawn.expected).unsqueeze(1) * torch.tensor([1.0, 0.6, 0.3]))
    uniform = torch.rand(p.shape, generator=torch.Generator().manual_seed(seed + 17))
    return dataclasses.replace(drawn, y=(uniform < p).float(), expected=p)


def log_losses(z: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return the expected log loss of every row, averaged over its tasks."""
    p = rows.expected.reshape(z.shape)
    loss = p * F.softplus(-z) + (1 - p) * F.softplus(z)
    return loss if loss.ndim == 1 else loss.mean(1)


def class_losses(z: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return the expected cross entropy of every row."""
    return -(rows.expected * torch.log_softmax(z, 1)).sum(1)


def squared_losses(z: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return the expected squared error of every row."""
    return (z - rows.expected).square() + NOISE_SD**2


class Fields(nn.Module):
    """Embeddings of the categories beside the logarithms of the counts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in CARDINALITIES)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.1)
        self.width = COUNTS + width * len(CARDINALITIES)

    def forward(self, counts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return [rows, width]."""
        embedded = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return torch.cat([*embedded, torch.log1p(counts) * 0.3], dim=1)


class Perceptron(nn.Module):
    """Fields through two hidden layers; one output, or several."""

    def __init__(
        self, hidden: int, outputs: int = 1, *, norm: type[nn.Module] = nn.Identity
    ) -> None:
        super().__init__()
        self.fields = Fields(8)
        self.first = nn.Linear(self.fields.width, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.norm = norm(hidden)
        self.head = nn.Linear(hidden, outputs)

    def forward(self, rows: Rows) -> torch.Tensor:
        """Return [rows], or [rows, outputs]."""
        h = torch.relu(self.first(self.fields(rows.counts, rows.ids)))
        h = torch.relu(self.norm(self.second(h)))
        return self.head(h).squeeze(1)


class FieldAttention(nn.Module):
    """Every field a token; one layer of attention among them, as in AutoInt or HSTU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in CARDINALITIES)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.3)
        self.values = nn.Parameter(0.3 * torch.randn(COUNTS, width))
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 1)

    def forward(self, rows: Rows) -> torch.Tensor:
        """Return logits [rows]."""
        tokens = [table(rows.ids[:, i]).unsqueeze(1) for i, table in enumerate(self.tables)]
        counts = 0.3 * torch.log1p(rows.counts).unsqueeze(2) * self.values
        x = torch.cat([*tokens, counts], dim=1)
        weights = torch.matmul(self.query(x), self.key(x).transpose(1, 2)) / x.shape[-1] ** 0.5
        mixed = torch.matmul(torch.softmax(weights, -1), self.value(x))
        h = x + torch.relu(self.out(mixed))
        return self.head(h.mean(1)).squeeze(1) * 4


class Towers(nn.Module):
    """The demo's two towers on raw counts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TwoTower(SPEC, embedding=8, hidden=64, width=16)

    def forward(self, rows: Rows) -> torch.Tensor:
        """Return logits [rows]."""
        users, vocabularies = SPEC.user_counts, len(SPEC.user_cardinalities)
        return self.net(
            TensorBatch(
                user_counts=rows.counts[:, :users],
                item_counts=rows.counts[:, users:],
                user_categories=rows.ids[:, :vocabularies],
                item_categories=rows.ids[:, vocabularies:],
                clicks=rows.y,
            )
        )


class DeepCross(nn.Module):
    """deepctr-torch's DCN, which gives probabilities."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from deepctr_torch.inputs import DenseFeat, SparseFeat
            from deepctr_torch.models import DCN
        columns: list[Any] = [
            SparseFeat(f"c{i}", size, embedding_dim=8) for i, size in enumerate(CARDINALITIES)
        ]
        columns += [DenseFeat(f"d{i}", 1) for i in range(COUNTS)]
        self.net = DCN(columns, columns, dnn_hidden_units=(64, 64), init_std=0.05, seed=5)

    def forward(self, rows: Rows) -> torch.Tensor:
        """Return probabilities [rows]."""
        counts = torch.log1p(rows.counts) * 0.3
        return self.net(torch.cat([rows.ids.to(counts.dtype), counts], dim=1)).squeeze(1)


Loss = Callable[[torch.Tensor, Rows], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, its loss, and how it is trained.

    Attributes:
        name: Name in the results.
        make: Makes the model.
        loss: The training loss of a batch, without regularizers: (output, rows) -> scalar.
        losses: Expected loss of every fresh row, from the output in float64.
        rows: Draws rows.
        batch: Rows of a batch (of a micro-batch where there are several).
        micro_batches: Micro-batches per optimizer step.
        autocast: dtype of autocast, with a gradient scaler, or None.
        learning_rate: Of Adam, at the start.
        to_logits: Whether the output is a probability.
        regularizer: Added to the training loss: model -> scalar, or None.
    """

    name: str
    make: Callable[[], nn.Module]
    loss: Loss
    losses: Callable[[torch.Tensor, Rows], torch.Tensor] = log_losses
    rows: Callable[[int, int], Rows] = click_rows
    batch: int = 512
    micro_batches: int = 1
    autocast: torch.dtype | None = None
    learning_rate: float = 1e-2
    to_logits: bool = False
    regularizer: Callable[[Any], torch.Tensor] | None = None

    def training_loss(self, model: nn.Module, output: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return what the training differentiates."""
        loss = self.loss(output, rows)
        return loss if self.regularizer is None else loss + self.regularizer(model)

    def fresh_losses(self, model: nn.Module, rows: Rows) -> torch.Tensor:
        """Return the expected loss of every row under the float64 model."""
        output = model(rows)
        return self.losses(torch.logit(output) if self.to_logits else output, rows)


def _mean_log_loss(z: torch.Tensor, rows: Rows) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(z, rows.y)


def _deepctr_regularizer(model: DeepCross) -> torch.Tensor:
    total: torch.Tensor = model.net.get_regularization_loss() + model.net.aux_loss
    return total


def cases() -> tuple[Case, ...]:
    """Return every case."""
    return (
        Case("mlp", lambda: Perceptron(64), _mean_log_loss),
        Case("two-tower-raw-counts", Towers, _mean_log_loss),
        Case(
            "deepctr-dcn-sum",
            DeepCross,
            lambda p, r: F.binary_cross_entropy(p, r.y, reduction="sum"),
            to_logits=True,
            learning_rate=3e-3,
            regularizer=_deepctr_regularizer,
        ),
        Case("attention-tokens", lambda: FieldAttention(16), _mean_log_loss, batch=256),
        Case("scaler-fp16", lambda: Perceptron(64), _mean_log_loss, autocast=torch.float16),
        Case(
            "accumulation",
            lambda: Perceptron(96, norm=nn.LayerNorm),
            lambda z, r: _mean_log_loss(z, r) / 4,
            micro_batches=4,
            batch=256,
        ),
        Case(
            "classes",
            lambda: Perceptron(64, CLASSES),
            lambda z, r: F.cross_entropy(z, r.y),
            losses=class_losses,
            rows=class_rows,
        ),
        Case(
            "squared-error",
            lambda: Perceptron(64),
            lambda z, r: F.mse_loss(z, r.y),
            losses=squared_losses,
            rows=value_rows,
        ),
        Case(
            "batch-norm",
            lambda: Perceptron(64, norm=nn.BatchNorm1d),
            _mean_log_loss,
        ),
        Case(
            "three-tasks",
            lambda: Perceptron(64, 3),
            _mean_log_loss,
            rows=task_rows,
        ),
    )


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is done.

    Attributes:
        train: Optimizer steps before recording.
        record: Optimizer steps recorded.
        fresh_batches: Batches on which losses are measured.
        gradient_batches: Batches on which gradients are measured.
    """

    train: int
    record: int
    fresh_batches: int
    gradient_batches: int


def batches(case: Case, count: int, seed: int) -> Iterator[Rows]:
    """Draw batches; no row comes twice, under no seed."""
    per_draw = max(1, POOL // case.batch)
    for start in range(0, count, per_draw):
        pool = case.rows(per_draw * case.batch, seed * 1_000_003 + start)
        for number in range(min(per_draw, count - start)):
            yield pool.part(number * case.batch, (number + 1) * case.batch)


def train(case: Case, path: Path, size: Size) -> nn.Module:
    """Train a model on a stream of rows, recording its last steps; return it."""
    torch.manual_seed(11)
    model = case.make()
    optimizer = torch.optim.Adam(model.parameters(), lr=case.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, size.train, eta_min=case.learning_rate * 1e-3
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, enabled=case.autocast is not None)
    stream = batches(case, (size.train + size.record) * case.micro_batches, seed=1)

    def one_step() -> None:
        optimizer.zero_grad()
        for _ in range(case.micro_batches):
            rows = next(stream)
            with torch.autocast("cpu", dtype=case.autocast, enabled=case.autocast is not None):
                output = model(rows)
            scaler.scale(case.training_loss(model, output.float(), rows)).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(size.train):
        one_step()
        schedule.step()
    with record(model, path, schedule=Schedule.always(), recipes=RECIPES, seed=1) as recorder:
        for _ in range(size.record):
            one_step()
            recorder.step()
    return model
