"""Operands drawn from the distribution that a trace recorded, deterministic per site and draw.

What decides the FP8 error of a product, and is therefore drawn as recorded:

- of x, a and b: the distribution of every feature, and their covariance
  (:mod:`loka_toolkit.harness.marginals`);
- of w: both second moments, along rows and along columns (:mod:`loka_toolkit.harness.spectra`);
- of g: norms, and directions whose second moment is that of g, norms included
  (:mod:`loka_toolkit.harness.directions`);
- of g and x together: the cross moment (:mod:`loka_toolkit.harness.cross`);
- of a batched product of activations: whole matrices as samples, both factors jointly where they
  are small enough, kinds of products (heads) apart.

``benchmarks/input_fidelity.py`` measures how close the errors come. Traces of schema 1 have means,
covariances and seven quantiles of norms only: they are drawn as normals
(:mod:`loka_toolkit.harness.normal`), whose errors in backward products are off by factors.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Protocol

import torch

from loka_toolkit.artifacts.sites import Operand, Role
from loka_toolkit.harness.cross import CrossSampler
from loka_toolkit.harness.directions import DirectionSampler
from loka_toolkit.harness.features import FeatureMoments, TensorMoments
from loka_toolkit.harness.marginals import CopulaSampler
from loka_toolkit.harness.moments import MomentsOfTrace
from loka_toolkit.harness.normal import NormalSampler
from loka_toolkit.harness.spectra import SpectrumMoments, SpectrumSampler
from loka_toolkit.harness.workloads import Factor, Workload

FROM_MOMENTS = "moments"
"""What ``inputs`` of a row says if both factors were drawn from moments per feature."""

_KEPT_SOURCES = 4
_JOINT = "ab"


@dataclasses.dataclass(frozen=True)
class Draw:
    """Both factors of one workload, and how they came about.

    Attributes:
        a: [.., M, K] in the dtype and layout recorded.
        b: [.., K, N].
        amax_a: Largest magnitude recorded of the left operand, or None.
        amax_b: The same of the right one.
        inputs: ``moments``, or the reason for anything else.
    """

    a: torch.Tensor
    b: torch.Tensor
    amax_a: float | None
    amax_b: float | None
    inputs: str


class Sampler(Protocol):
    """Draws samples."""

    def sample(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return samples [count, features], float32."""
        ...


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where the matrices of an operand come from.

    Attributes:
        samplers: One for each kind of product; product i is of kind i modulo their number.
        is_whole: Whether a whole matrix is one sample, and not each of its rows.
        is_shared: Whether all products of a batch have the same matrix.
        first: First feature of the operand in a joint sample; None if samples are its own.
        reason: Why this is not the recorded distribution, or None.
    """

    samplers: tuple[Sampler, ...]
    is_whole: bool = False
    is_shared: bool = False
    first: int | None = None
    reason: str | None = None

    def sample(self, batch: int, rows: int, width: int, generator: torch.Generator) -> torch.Tensor:
        """Return matrices [batch, rows, width], float32."""
        if self.is_shared:
            return self.samplers[0].sample(rows, generator).expand(batch, rows, width)
        kinds = len(self.samplers)
        parts = []
        for kind, sampler in enumerate(self.samplers):
            products = len(range(kind, batch, kinds))
            count = products if self.is_whole else products * rows
            drawn = sampler.sample(count, generator)
            if self.first is not None:
                drawn = drawn[:, self.first : self.first + rows * width]
            parts.append(drawn.reshape(products, rows, width))
        if kinds == 1:
            return parts[0]
        out = parts[0].new_empty(batch, rows, width)
        for kind, part in enumerate(parts):
            out[kind::kinds] = part
        return out


class InputDrawer:
    """Draws operands; keeps what was last worked out, which a layer's sites share.

    Args:
        moments: What the trace recorded.
        device: Where to draw: the numbers depend on the kind of device.
        seed: Draws with another seed are independent.
    """

    def __init__(self, moments: MomentsOfTrace, device: torch.device, seed: int) -> None:
        self._moments = moments
        self._device = device
        self._seed = seed
        self._sources: dict[tuple[object, ...], _Source] = {}
        self._crossings: dict[tuple[object, ...], CrossSampler | None] = {}

    def draw(self, workload: Workload, index: int) -> Draw:
        """Return the factors of draw number ``index``."""
        reasons: list[str] = []
        a = self._operand(workload, workload.a, index, reasons)
        b = self._operand(workload, workload.b, index, reasons)
        if workload.site.role is Role.WGRAD:
            a = self._with_cross(workload, a, b, index)
        layer = workload.site.layer
        return Draw(
            a=self._placed(workload, workload.a, a),
            b=self._placed(workload, workload.b, b),
            amax_a=self._moments.amax(layer, workload.a.operand),
            amax_b=self._moments.amax(layer, workload.b.operand),
            inputs="; ".join(reasons) or FROM_MOMENTS,
        )

    def _operand(
        self, workload: Workload, factor: Factor, index: int, reasons: list[str]
    ) -> torch.Tensor:
        """Return an operand as recorded, float32 [batch, rows, width]."""
        layer, batch = workload.site.layer, workload.problem.batch
        if factor.operand is Operand.B and self._moments.is_tied(layer):
            turned = dataclasses.replace(
                factor, operand=Operand.A, rows=factor.width, width=factor.rows
            )
            return self._operand(workload, turned, index, reasons).mT
        source = self._source(workload, factor)
        if source.reason is not None:
            reasons.append(source.reason)
        # Both factors of a joint sample come from the same numbers.
        name = _JOINT if source.first is not None else factor.operand.value
        generator = self._generator(workload, name, index)
        return source.sample(batch, factor.rows, factor.width, generator)

    def _placed(self, workload: Workload, factor: Factor, rows: torch.Tensor) -> torch.Tensor:
        operand = rows.to(factor.dtype)
        if factor.transposed:
            operand = operand.mT
        return _laid_out(operand if workload.batched else operand[0], factor.layout)

    def _generator(self, workload: Workload, name: str, index: int) -> torch.Generator:
        generator = torch.Generator(self._device)
        generator.manual_seed(_seed_of(self._seed, workload, name, index))
        return generator

    def _with_cross(
        self, workload: Workload, g: torch.Tensor, x: torch.Tensor, index: int
    ) -> torch.Tensor:
        """Return g [1, rows, O] with the recorded cross moment, where there is one."""
        if workload.problem.batch != 1:
            return g
        layer, widths = workload.site.layer, (workload.a.width, workload.b.width)
        key = (layer, *widths)
        if key not in self._crossings:
            self._crossings.clear()
            self._crossings[key] = self._new_crossing(layer, *widths)
        crossing = self._crossings[key]
        if crossing is None:
            return g
        return crossing.sample(x[0], self._generator(workload, "gx", index)).unsqueeze(0)

    def _new_crossing(self, layer: str, outputs: int, inputs: int) -> CrossSampler | None:
        cross = self._moments.cross(layer, outputs, inputs)
        g = self._moments.features(layer, Operand.G, outputs)
        x = self._moments.features(layer, Operand.X, inputs)
        if cross is None or g is None or x is None or not g.norm_quantiles.size:
            return None
        if not (cross.is_finite and g.is_finite and x.is_finite):
            return None
        directions = DirectionSampler(g, self._device)
        return CrossSampler(cross, x, g, directions, self._device)

    def _source(self, workload: Workload, factor: Factor) -> _Source:
        key = (workload.site.layer, factor.operand, factor.rows, factor.width)
        if key not in self._sources:
            while len(self._sources) >= _KEPT_SOURCES:
                self._sources.pop(next(iter(self._sources)))
            self._sources[key] = self._new_source(workload, factor)
        return self._sources[key]

    def _new_source(self, workload: Workload, factor: Factor) -> _Source:
        layer, name = workload.site.layer, factor.operand.value
        spectra = self._spectra(layer, factor)
        if spectra and all(s.is_finite for s in spectra):
            weights = self._weights(workload, factor, spectra)
            if weights is not None:
                return weights
        whole = self._whole_matrices(workload, factor)
        if whole is not None:
            return whole
        by_kind = self._moments.slots(layer, name, factor.width, 1)
        if by_kind and all(moments.is_finite for moments in by_kind):
            reason = None
            if workload.batched and self._moments.has_whole(layer, factor.operand):
                reason = f"matrices {name} recorded in another shape: rows drawn one by one"
            samplers = tuple(self._sampler(moments, factor) for moments in by_kind)
            return _Source(samplers, reason=reason)
        widths = self._moments.widths(layer, factor.operand)
        if by_kind or not all(spectrum.is_finite for spectrum in spectra):
            why = f"moments of {name} hold Inf or NaN"
        elif spectra:
            outputs = sum(spectrum.outputs for spectrum in spectra)
            why = f"moments of {name} recorded for {outputs} rows, not {factor.rows}"
        elif widths:
            known = ", ".join(map(str, widths))
            why = f"moments of {name} recorded for width {known}, not {factor.width}"
        else:
            why = f"moments missing for {name}"
        tensor = self._moments.tensor(layer, factor.operand)
        if tensor is not None:
            reason = f"{why}: normal with recorded mean and variance"
        else:
            reason = f"{why} and nothing else recorded of it: unit normal"
            tensor = TensorMoments(0.0, 1.0, 0.0)
        sampler = NormalSampler.from_tensor(tensor, factor.width, self._device)
        return _Source((sampler,), reason=reason)

    def _spectra(self, layer: str, factor: Factor) -> tuple[SpectrumMoments, ...]:
        return self._moments.spectra(layer, factor.width) if factor.operand is Operand.W else ()

    def _weights(
        self, workload: Workload, factor: Factor, spectra: tuple[SpectrumMoments, ...]
    ) -> _Source | None:
        """Return the source of a weight with the recorded number of rows, or None."""
        outputs = sum(spectrum.outputs for spectrum in spectra)
        # One parameter may serve every product of a batch.
        is_shared = len(spectra) == 1 and factor.rows == outputs
        if not is_shared and outputs != workload.problem.batch * factor.rows:
            return None
        samplers = tuple(SpectrumSampler(spectrum, self._device) for spectrum in spectra)
        return _Source(samplers, is_shared=is_shared)

    def _whole_matrices(self, workload: Workload, factor: Factor) -> _Source | None:
        """Return the source of whole matrices of a batched product, where they were recorded."""
        layer = workload.site.layer
        own = factor.rows * factor.width
        if factor.operand in (Operand.A, Operand.B):
            features = sum(rows * width for rows, width in _shapes(workload))
            joint = self._moments.slots(layer, _JOINT, features, 1)
            if joint and all(moments.is_finite for moments in joint):
                first = 0 if factor.operand is Operand.A else features - own
                samplers = tuple(self._joint_sampler(workload, at, m) for at, m in enumerate(joint))
                return _Source(samplers, is_whole=True, first=first)
        name = factor.operand.value
        if not workload.batched or factor.rows < 2:
            return None
        whole = self._moments.slots(layer, name, factor.width, factor.rows)
        if whole and all(moments.is_finite for moments in whole):
            return _Source(tuple(self._sampler(m, factor) for m in whole), is_whole=True)
        return None

    def _joint_sampler(self, workload: Workload, kind: int, moments: FeatureMoments) -> Sampler:
        norms, equal = [], []
        first = 0
        for name, (rows, width) in zip("ab", _shapes(workload), strict=True):
            own = self._moments.slots(workload.site.layer, name, width, rows)
            last = first + rows * width
            if kind < len(own) and own[kind].norm_quantiles.size:
                norms.append((slice(first, last), own[kind].norm_quantiles))
                equal.append((slice(first, last), own[kind].equal_row_shares))
            first = last
        return CopulaSampler(moments, self._device).with_norms(norms).with_equal_rows(equal)

    def _sampler(self, moments: FeatureMoments, factor: Factor) -> Sampler:
        if factor.operand is Operand.G:
            if moments.norm_quantiles.size:
                return DirectionSampler(moments, self._device)
            return NormalSampler.from_features(moments, self._device, with_norms=True)
        if moments.marginal_counts is not None:
            whole = slice(0, moments.width)
            sampler = CopulaSampler(moments, self._device)
            sampler.with_norms([(whole, moments.norm_quantiles)])
            return sampler.with_equal_rows([(whole, moments.equal_row_shares)])
        return NormalSampler.from_features(moments, self._device, with_norms=False)


def _shapes(workload: Workload) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of a and b of one product of activations, whatever the role."""
    p = workload.problem
    if p.role is Role.GRAD_A:  # out [M, K] of g [M, N] b^T [N, K], named m, n, k of the product
        return (p.m, p.n), (p.n, p.k)
    if p.role is Role.GRAD_B:  # out [K, N] of a^T [K, M] g [M, N]
        return (p.k, p.m), (p.m, p.n)
    return (p.m, p.k), (p.k, p.n)


def _laid_out(factor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the factor in the layout recorded; a strided one is left as drawn."""
    if layout == "row":
        return factor.contiguous()
    if layout == "column":
        return factor.mT.contiguous().mT
    return factor


def _seed_of(seed: int, workload: Workload, name: str, index: int) -> int:
    text = f"{seed}/{workload.site}/{workload.identity['dims']}/{name}/{index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
