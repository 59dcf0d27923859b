"""Models whose every GEMM is counted: third-party ones as they are, and one that uses it all.

Sizes are small: what is compared is which calls are made, not how large they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Step = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Case:
    """One model and its training step.

    Attributes:
        name: What it is called in the table.
        library: Where it comes from.
        model: The model, in training mode.
        step: Runs forward and backward of one optimizer step, without the optimizer.
        weights: Parameter multiplied by every forward site that has one, written by hand; None
            where that was not done.
    """

    name: str
    library: str
    model: nn.Module
    step: Step
    weights: dict[str, str] | None = None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep third-party libraries from printing and from warning."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _deepctr(name: str, batch: int, **options: object) -> Case:
    with quiet():
        from deepctr_torch import models
        from deepctr_torch.inputs import DenseFeat, SparseFeat

        columns = [SparseFeat(f"c{i}", 50, embedding_dim=4) for i in range(5)]
        columns += [DenseFeat(f"i{i}", 1) for i in range(3)]
        model = getattr(models, name)(columns, columns, dnn_hidden_units=(16, 8), **options)
    rows = torch.cat([torch.randint(50, (batch, 5)).float(), torch.randn(batch, 3)], dim=1)
    y = (torch.rand(batch) < 0.3).float()

    def step() -> None:
        predicted = model(rows).squeeze(-1)
        loss = F.binary_cross_entropy(predicted, y, reduction="sum")
        (loss + model.get_regularization_loss()).sum().backward()

    model.train()
    variant = options.get("cross_parameterization")
    return Case(f"{name} ({variant})" if variant else name, "deepctr-torch", model, step)


DCN_MATRIX_WEIGHTS = {
    "linear_model#0:fwd": "linear_model.weight",
    "crossnet#0:fwd": "crossnet.kernels",
    "crossnet#1:fwd": "crossnet.kernels",
    "dnn.linears.0#0:fwd": "dnn.linears.0.weight",
    "dnn.linears.1#0:fwd": "dnn.linears.1.weight",
    "dnn_linear#0:fwd": "dnn_linear.weight",
}
"""The cross layers multiply slices of one three-dimensional parameter."""


def dcn_vector(batch: int) -> Case:
    """deepctr-torch's DCN whose cross layers hold vectors."""
    return _deepctr("DCN", batch, cross_parameterization="vector")


def dcn_matrix(batch: int) -> Case:
    """deepctr-torch's DCN whose cross layers hold matrices."""
    case = _deepctr("DCN", batch, cross_parameterization="matrix")
    return dataclasses.replace(case, weights=DCN_MATRIX_WEIGHTS)


def deepfm(batch: int) -> Case:
    """deepctr-torch's DeepFM."""
    return _deepctr("DeepFM", batch)


def deepctr_autoint(batch: int) -> Case:
    """deepctr-torch's AutoInt: attention by einsum over raw parameters."""
    return _deepctr("AutoInt", batch, att_layer_num=2)


def hstu(batch: int) -> Case:
    """torch-rechub's HSTU, trained to tell the next item."""
    with quiet():
        from torch_rechub.models.generative import HSTUModel

        model = HSTUModel(60, d_model=16, n_heads=2, n_layers=2, dqk=8, dv=8, max_seq_len=12)
    items = torch.randint(1, 60, (batch, 12))
    ages = torch.randint(0, 100_000, (batch, 12))

    def step() -> None:
        logits = model(items, ages)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), items[:, 1:].flatten()).backward()

    return Case("HSTU", "torch-rechub", model.train(), step)


def dcn_v2(batch: int) -> Case:
    """torch-rechub's DCNv2: low-rank experts in lists of three-dimensional parameters."""
    with quiet():
        from torch_rechub.basic.features import DenseFeature, SparseFeature
        from torch_rechub.models.ranking import DCNv2

        features = [SparseFeature(f"c{i}", 50, embed_dim=4) for i in range(4)]
        features += [DenseFeature(f"i{i}") for i in range(3)]
        model = DCNv2(features, 2, {"dims": [16, 8]}, low_rank=5, num_experts=2)
    x = {f"c{i}": torch.randint(50, (batch,)) for i in range(4)}
    x |= {f"i{i}": torch.randn(batch) for i in range(3)}
    y = (torch.rand(batch) < 0.3).float()

    def step() -> None:
        F.binary_cross_entropy(model(x), y).backward()

    return Case("DCNv2", "torch-rechub", model.train(), step)


def torchfm_autoint(batch: int) -> Case:
    """Torchfm's AutoInt: nn.MultiheadAttention, whose output projection is never called."""
    with quiet():
        from torchfm.model.afi import AutomaticFeatureInteractionModel

        with _old_numpy():
            model = AutomaticFeatureInteractionModel(
                [20] * 5, 4, 8, 2, 2, (16, 8), (0.1, 0.1), has_residual=True
            )
    x = torch.randint(20, (batch, 5))
    y = (torch.rand(batch) < 0.3).float()

    def step() -> None:
        F.binary_cross_entropy(model(x), y).backward()

    return Case("AutoInt", "torchfm", model.train(), step)


@contextlib.contextmanager
def _old_numpy() -> Iterator[None]:
    """Give NumPy the name ``long`` that torchfm 0.7.0 uses and NumPy 1.24 dropped."""
    import numpy as np

    is_missing = "long" not in np.__dict__
    if is_missing:
        np.long = np.int64  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if is_missing:
            del np.long  # type: ignore[attr-defined]


def decoder(batch: int) -> Case:
    """x-transformers' decoder with fused attention."""
    with quiet():
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, attn_flash=True)
        model = TransformerWrapper(num_tokens=50, max_seq_len=12, attn_layers=layers)
    tokens = torch.randint(50, (batch, 12))

    def step() -> None:
        logits = model(tokens)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()

    return Case("decoder", "x-transformers", model.train(), step)


class Scale(torch.autograd.Function):
    """A product in a custom function, with its gradients written by hand."""

    @staticmethod
    def forward(ctx, x, w):  # type: ignore[no-untyped-def]
        """Return x w^T."""
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        """Return both gradients."""
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


class Scores(nn.Module):
    """Products of activations only, so that its name cannot be told from a parameter."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return [N, F, F] of [N, F, D] each."""
        return torch.einsum("nfd,ngd->nfg", a, b)


class Everything(nn.Module):
    """Every way to multiply that the recorder claims to see. Input [N, 4, 8], output [N]."""

    def __init__(self, *, compiles: bool) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.encoder.weight
        self.direct = nn.Linear(8, 8)
        self.functional = nn.Linear(8, 8)
        self.shared = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))
        self.left = nn.Parameter(torch.randn(8, 8) / 3)
        self.right = nn.Parameter(torch.randn(8, 8) / 3)
        self.stack = nn.Parameter(torch.randn(2, 8, 8) / 3)
        self.vector = nn.Parameter(torch.randn(8))
        self.custom = nn.Parameter(torch.randn(8, 8) / 3)
        self.scores = Scores()
        self.plain = nn.Conv1d(4, 6, 3, padding=1)
        self.strided = nn.Conv1d(6, 4, 2, stride=2, groups=2)
        self.image = nn.Conv2d(1, 2, (2, 3), dilation=(1, 2))
        self.solid = nn.Conv3d(1, 1, 2)
        self.upward = nn.ConvTranspose1d(4, 4, 2, stride=2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.merge = nn.Linear(16, 8)
        self.bilinear = nn.Bilinear(8, 8, 8)
        self.reentrant = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.saving = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.narrow = nn.Linear(8, 8)
        inner = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.compiled = torch.compile(inner, backend="aot_eager") if compiles else inner
        self.head = nn.Linear(8, 1)

    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        """Return one logit per example."""
        h = self.tied(self.encoder(x))
        h = self.direct.forward(h) + F.linear(h, self.functional.weight)
        h = self.shared(self.shared(h))
        h = h @ self.right + (self.left @ h.flatten(0, 1).t()).t().view_as(h)
        h = h @ self.stack[0] + torch.matmul(self.stack[1], h.mT).mT
        h = h + Scale.apply(h.flatten(0, 1), self.custom).view_as(h)
        h = h + self.scores.forward(h, h) @ h
        h = h + self.upward(self.strided(self.plain(h)))[:, :, :8]
        h = h + self.image(h.unsqueeze(1)).mean((1, 2, 3))[:, None, None]
        h = h + self.solid(h.view(-1, 1, 4, 4, 2)).mean((1, 2, 3, 4))[:, None, None]
        h = h + self.attention(query=h, key=h, value=h, need_weights=False)[0]
        heads = h.unflatten(-1, (2, 4)).transpose(1, 2)
        h = h + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(
            1, 2
        ).flatten(-2)
        h = h + self.gru(h)[0] + self.merge(self.lstm(h)[0])
        h = h + self.bilinear(h, h.tanh())
        h = h + checkpoint(self.reentrant, h, use_reentrant=True)
        h = h + checkpoint(self.saving, h, use_reentrant=False)
        with torch.autocast("cpu", torch.bfloat16):
            h = h + self.narrow(h)
        h = F.layer_norm(self.compiled(h), (8,))
        gate = torch.addmv(h.new_zeros(len(h)), h[:, 0], self.vector) + h[:, 1] @ self.vector
        extra = torch.addbmm(h.new_zeros(4, 4), h, h.mT).mean() + torch.dot(h[0, 0], self.vector)
        return self.head(h).mean((1, 2)) + gate + extra


EVERYTHING_WEIGHTS = {
    "encoder#0:fwd": "encoder.weight",
    "tied#0:fwd": "encoder.weight",
    "direct#0:fwd": "direct.weight",
    "functional#0:fwd": "functional.weight",
    "shared.0#0:fwd": "shared.0.weight",
    "shared.0#1:fwd": "shared.0.weight",
    "(root)#0:fwd": "right",
    "(root)#1:fwd": "left",
    "(root)#2:fwd": "stack",
    "(root)#3:fwd": "stack",
    "(root)#4:fwd": "custom",
    "plain#0:fwd": "plain.weight",
    "strided#0:fwd": "strided.weight",
    "image#0:fwd": "image.weight",
    "solid#0:fwd": "solid.weight",
    "upward#0:fwd": "upward.weight",
    "attention#0:fwd": "attention.in_proj_weight",
    "attention.out_proj#0:fwd": "attention.out_proj.weight",
    "gru#0:fwd": "gru.weight_ih_l0",
    **{f"gru#{step}:fwd": "gru.weight_hh_l0" for step in range(1, 5)},
    "lstm#0:fwd": "lstm.weight_ih_l0",
    "lstm#1:fwd": "lstm.weight_ih_l0_reverse",
    "merge#0:fwd": "merge.weight",
    "bilinear#0:fwd": "bilinear.weight",
    "reentrant.0#0:fwd": "reentrant.0.weight",
    "reentrant.2#0:fwd": "reentrant.2.weight",
    "saving.0#0:fwd": "saving.0.weight",
    "saving.2#0:fwd": "saving.2.weight",
    "narrow#0:fwd": "narrow.weight",
    "compiled.0#0:fwd": "compiled.0.weight",
    "(root)#7:fwd": "vector",
    "(root)#8:fwd": "vector",
    "(root)#10:fwd": "vector",
    "head#0:fwd": "head.weight",
}


def everything(batch: int, *, compiles: bool = True) -> Case:
    """A module that uses all of it, over two micro-batches."""
    model = Everything(compiles=compiles)
    x, y = torch.randn(2 * batch, 4, 8), (torch.rand(2 * batch) < 0.3).float()

    def step() -> None:
        for part in (slice(0, batch), slice(batch, 2 * batch)):
            logits = model(x=x[part])
            (F.binary_cross_entropy_with_logits(logits, y[part]) / 2).backward()

    return Case("everything at once", "own", model.train(), step, EVERYTHING_WEIGHTS)


CASES: tuple[Callable[[int], Case], ...] = (
    dcn_vector,
    dcn_matrix,
    deepfm,
    deepctr_autoint,
    hstu,
    dcn_v2,
    torchfm_autoint,
    decoder,
    everything,
)
