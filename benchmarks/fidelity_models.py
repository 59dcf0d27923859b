"""Click models whose products have hard inputs, and the operands that each product multiplied.

Every product is tapped where the model computes it, by name, so that what is compared does not pass
through the recorder: inputs and parameters as multiplied, gradients by a hook of the output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from loka_toolkit.datasets.click_log import ClickLogSpec
from loka_toolkit.workflows.two_tower import TensorBatch, TwoTower

SPEC = ClickLogSpec()
CARDINALITIES = (*SPEC.user_cardinalities, *SPEC.item_cardinalities)
COUNTS = SPEC.user_counts + SPEC.item_counts


@dataclasses.dataclass
class Tapped:
    """The operands of one product, whole.

    Attributes:
        left: x [T, I], or a [B, M, K].
        right: w [O, I], or b [B, K, N].
        has_parameter: Whether ``right`` is a parameter.
        has_dgrad: Whether ``left`` has a gradient.
        gradient: g [T, O], or [B, M, N]; None before backward.
    """

    left: torch.Tensor
    right: torch.Tensor
    has_parameter: bool
    has_dgrad: bool = True
    gradient: torch.Tensor | None = None


class Taps:
    """Collects the operands of products while it is on.

    Attributes:
        found: By layer name, ``FQN#CALL``; None while it is off.
    """

    def __init__(self) -> None:
        self.found: dict[str, Tapped] | None = None

    def product(
        self, name: str, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, *, weight: bool
    ) -> None:
        """Note a product; a parameter is given as [O, I]."""
        if self.found is None:
            return
        if weight:
            left = left.reshape(-1, left.shape[-1])
        tapped = Tapped(left.detach().clone(), right.detach().clone(), weight, left.requires_grad)
        self.found[name] = tapped

        def take(gradient: torch.Tensor) -> None:
            flat = gradient.reshape(-1, gradient.shape[-1]) if weight else gradient
            tapped.gradient = flat.detach().clone()

        out.register_hook(take)

    def watch_linears(self, model: nn.Module) -> None:
        """Tap every nn.Linear of a model, each called once."""
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self._linear_hook(name))

    def _linear_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Linear, inputs: tuple[torch.Tensor], out: torch.Tensor) -> None:
            self.product(f"{name}#0", inputs[0], module.weight, out, weight=True)

        return hook


def _embeddings(width: int) -> nn.ModuleList:
    tables = nn.ModuleList(nn.Embedding(size, width) for size in CARDINALITIES)
    for table in tables:
        assert isinstance(table, nn.Embedding)
        nn.init.normal_(table.weight, std=0.1)
    return tables


def _fields(tables: nn.ModuleList, batch: TensorBatch) -> list[torch.Tensor]:
    ids = torch.cat([batch.user_categories, batch.item_categories], dim=1)
    return [table(ids[:, i]) for i, table in enumerate(tables)]


def _log_counts(batch: TensorBatch) -> torch.Tensor:
    return torch.log1p(torch.cat([batch.user_counts, batch.item_counts], dim=1))


class Dlrm(nn.Module):
    """A bottom stack on counts, dot products between all fields, a top stack."""

    def __init__(self, taps: Taps, width: int = 24) -> None:
        super().__init__()
        self.taps = taps
        self.tables = _embeddings(width)
        self.bottom = nn.Sequential(
            nn.Linear(COUNTS, 96), nn.ReLU(), nn.Linear(96, width), nn.ReLU()
        )
        fields = len(CARDINALITIES) + 1
        self.register_buffer("pairs", torch.triu_indices(fields, fields, 1))
        self.top = nn.Sequential(
            nn.Linear(width + fields * (fields - 1) // 2, 128),
            nn.ReLU(),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Linear(64, 1),
        )

    def forward(self, batch: TensorBatch) -> torch.Tensor:
        """Return logits [rows]."""
        dense = self.bottom(_log_counts(batch))
        z = torch.stack([dense, *_fields(self.tables, batch)], dim=1)
        dots = torch.bmm(z, z.mT)
        self.taps.product("(root)#0", z, z.mT, dots, weight=False)
        upper = dots[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, upper], dim=1)).squeeze(1)


class Dcn(nn.Module):
    """Cross layers with raw parameters, vector and matrix, beside a deep stack."""

    def __init__(self, taps: Taps, width: int = 12) -> None:
        super().__init__()
        self.taps = taps
        self.tables = _embeddings(width)
        d = COUNTS + width * len(CARDINALITIES)
        self.vector = nn.Parameter(torch.randn(d, 1) * d**-0.5)
        self.matrix = nn.Parameter(torch.randn(d, d) * d**-0.5)
        self.bias = nn.Parameter(torch.zeros(d))
        self.deep = nn.Sequential(nn.Linear(d, 96), nn.SiLU(), nn.Linear(96, 48), nn.SiLU())
        self.head = nn.Linear(d + 48, 1)

    def forward(self, batch: TensorBatch) -> torch.Tensor:
        """Return logits [rows]."""
        x0 = torch.cat([*_fields(self.tables, batch), _log_counts(batch)], dim=1)
        gate = x0 @ self.vector
        self.taps.product("(root)#0", x0, self.vector.mT, gate, weight=True)
        x1 = 0.1 * x0 * gate + x0
        crossed = x1 @ self.matrix
        self.taps.product("(root)#1", x1, self.matrix.mT, crossed, weight=True)
        x2 = x0 * (crossed + self.bias) + x1
        return self.head(torch.cat([x2, self.deep(x0)], dim=1)).squeeze(1)


class Attention(nn.Module):
    """Two heads of self-attention over the fields, a feed-forward, a head."""

    def __init__(self, taps: Taps, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.taps = taps
        self.heads = heads
        self.tables = _embeddings(width)
        self.count_vectors = nn.Parameter(0.1 * torch.randn(COUNTS, width))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width * (COUNTS + len(CARDINALITIES)), 1)

    def forward(self, batch: TensorBatch) -> torch.Tensor:
        """Return logits [rows]."""
        counts = _log_counts(batch).unsqueeze(-1) * self.count_vectors
        x = torch.cat([torch.stack(_fields(self.tables, batch), dim=1), counts], dim=1)
        rows, tokens, width = x.shape
        q, k, v = (
            part.reshape(rows, tokens, self.heads, -1)
            .transpose(1, 2)
            .reshape(rows * self.heads, tokens, -1)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = torch.bmm(q, k.mT)
        self.taps.product("(root)#0", q, k.mT, scores, weight=False)
        shares = torch.softmax(scores * q.shape[-1] ** -0.5, dim=-1)
        mixed = torch.bmm(shares, v)
        self.taps.product("(root)#1", shares, v, mixed, weight=False)
        mixed = mixed.reshape(rows, self.heads, tokens, -1).transpose(1, 2)
        x = self.norm(x + self.out(mixed.reshape(rows, tokens, width)))
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(x.flatten(1)).squeeze(1)


class Wide(nn.Module):
    """Embeddings and raw counts side by side, wider than a full covariance is kept for."""

    def __init__(self, width: int = 144) -> None:
        super().__init__()
        self.tables = _embeddings(width)
        self.input = nn.Linear(COUNTS + width * len(CARDINALITIES), 128)
        self.rest = nn.Sequential(nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: TensorBatch) -> torch.Tensor:
        """Return logits [rows]."""
        x = torch.cat([*_fields(self.tables, batch), _log_counts(batch)], dim=1)
        return self.rest(self.input(x)).squeeze(1)


def build(name: str, taps: Taps) -> nn.Module:
    """Return a model of :data:`MODELS`, its linear layers tapped."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "two-tower": lambda: TwoTower(SPEC),
        "dlrm": lambda: Dlrm(taps),
        "dcn": lambda: Dcn(taps),
        "attention": lambda: Attention(taps),
        "wide": Wide,
    }
    model = makers[name]()
    taps.watch_linears(model)
    return model


MODELS = ("two-tower", "dlrm", "dcn", "attention", "wide")
