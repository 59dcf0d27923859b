"""The terms of a report."""

from __future__ import annotations

from loka_toolkit.artifacts.safety_map import FAST_SPEEDUP

TERMS: tuple[tuple[str, str], ...] = (
    (
        "site",
        "One matrix product (GEMM) of the model: path of the module, index of the product within "
        "the module, and role. Written module#index:role.",
    ),
    (
        "role",
        "What the product does in a training step. fwd: forward; dgrad: gradient of the input; "
        "wgrad: gradient of the weight; grad_a and grad_b: gradients of the two factors of a "
        "product of activations; norm: a normalization, observed and never replaced.",
    ),
    ("layer", "The sites of one product together: fwd, dgrad and wgrad."),
    (
        "recipe",
        "How a product is computed in FP8: format of the operands, grain of the scales, and how "
        "partial products are summed, as in e4m3/rowwise/fast. A mixed recipe names the formats "
        "of both operands.",
    ),
    ("cell", "One site under one recipe: the unit that gets a verdict."),
    (
        "E4M3, E5M2",
        "The two 8-bit floating-point formats: four exponent bits and three of mantissa, or five "
        "and two. E4M3 is finer, E5M2 spans more magnitudes.",
    ),
    (
        "scale",
        "A stored FP8 value times its decode scale gives back the original. tensorwise: one per "
        "tensor; rowwise: one per row or column along the contraction; static: one per tensor, "
        "known beforehand.",
    ),
    (
        "SQNR",
        "Signal-to-quantization-noise ratio: -20 log10 of the relative Frobenius error. 20 dB is "
        "an error of 10 %; 6 dB more halves it.",
    ),
    (
        "underflow",
        "Non-zero elements that become zero in FP8. The worst column group is the worst 16 "
        "neighbouring columns of an operand.",
    ),
    ("saturation", "Elements clipped at the largest finite value of the format."),
    (
        "exceedance rate",
        "The share of steps before the next probe in which the error breaks the tolerance. "
        "P(exceed) is its posterior mean; the interval holds it with 90 % probability.",
    ),
    (
        "tolerance",
        "What the error of a step may be. All its criteria must hold; each number has a reason.",
    ),
    (
        "budget, allotment",
        "The budget is the relative change of the loss that the whole model may suffer; a forward "
        "site's allotment is the budget times its share of the forward FLOPs.",
    ),
    (
        "impact",
        "Of a forward site: the expected relative change of the loss. Of a gradient site: bias "
        "and noise of the parameter gradients it reaches, noise in units of the minibatch noise.",
    ),
    (
        "safe, unsafe, insufficient evidence",
        "A cell is safe if even the 95 % quantile of its exceedance rate is within the tolerance "
        "and its impact within the allotment; unsafe if even the 5 % quantile is not, or the "
        "impact surely exceeds the allotment; otherwise the evidence does not suffice. A site is "
        "safe if any recipe is, unsafe if all are.",
    ),
    (
        "fast",
        f"Safe, and at least {FAST_SPEEDUP} times as fast as the default with casts included. The "
        "evidence is named: measured by replay, predicted by the roofline model, or none.",
    ),
    (
        "expected share of wrong safe verdicts",
        "The Bayesian false discovery rate: among the safe cells, the mean probability that the "
        "exceedance rate is above the tolerance after all.",
    ),
    (
        "R-hat, ESS, divergences, BFMI",
        "Health of the sampler: R-hat compares chains (1 is perfect), ESS is the number of "
        "independent draws that the sample is worth, divergences and a low BFMI mean that parts "
        "of the posterior were not explored.",
    ),
    (
        "effective steps",
        "Sampled steps after allowing for their resemblance to the steps before them.",
    ),
)
