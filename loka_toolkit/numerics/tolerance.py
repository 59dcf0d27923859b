"""The tolerance: what a step's error may be, and why each number is what it is."""

from __future__ import annotations

import math

import msgspec

from loka_toolkit.errors import ConfigurationError

REASONS: dict[str, str] = {
    "sqnr_db": (
        "10 % relative error of the product. E4M3 on well-scaled normal operands reaches 28.6 dB "
        "and E5M2 22.6 dB, so 20 dB passes both with room and fails where scaling loses bits; "
        "library test suites ask for 18 to 25 dB."
    ),
    "row_sqnr_db_p05": (
        "One example in twenty may be worse than the tensor, by at most 5 dB (18 % relative "
        "error): a tensor-wide figure hides examples that are small beside the largest one."
    ),
    "underflow_share_worst_group": (
        "At most a quarter of any 16 neighbouring input columns may be flushed to zero: with raw "
        "counts beside embeddings, a whole embedding vanished while the tensor still showed "
        "29.6 dB."
    ),
    "saturation_share": (
        "At most one element in a thousand may be clipped at the largest finite value: clipping "
        "is a bias that does not average out over steps."
    ),
    "gradient_bias": (
        "A parameter gradient may shrink or grow by at most 2 %: less than the step that a "
        "learning-rate schedule takes, and visible as a bias rather than noise."
    ),
    "gradient_noise_ratio": (
        "FP8 noise may add at most 5 % to the minibatch noise of a parameter gradient, as if the "
        "batch were 5 % smaller."
    ),
    "exceedance_rate": (
        "One step in twenty may break the tolerance before the next probe: rarer steps are "
        "averaged away by the optimizer."
    ),
    "relative_log_loss": (
        "0.02 % relative log loss is the smallest change that recommendation teams act upon."
    ),
}


class Tolerance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the error of a step may be; all criteria must hold. See ``REASONS`` for the reasons.

    Attributes:
        sqnr_db: Least signal-to-quantization-noise ratio of the output tensor, in dB.
        row_sqnr_db_p05: Least SQNR of the 5th-percentile output row, in dB.
        underflow_share_worst_group: Largest share, in [0, 1], of non-zero elements flushed to zero
            in any group of 16 consecutive input columns.
        saturation_share: Largest share, in [0, 1], of elements clipped to the largest finite value.
        gradient_bias: Largest magnitude of <dG,G>/<G,G> of a parameter gradient.
        gradient_noise_ratio: Largest |dG|^2 over the trace of the minibatch gradient covariance.
        exceedance_rate: Largest share, in (0, 1), of steps that may break a criterion.
        relative_log_loss: Budget of the whole model: relative change of the log loss.
        horizon_steps: Steps until the next probe, for which the verdict is given.
    """

    sqnr_db: float = 20.0
    row_sqnr_db_p05: float = 15.0
    underflow_share_worst_group: float = 0.25
    saturation_share: float = 1e-3
    gradient_bias: float = 0.02
    gradient_noise_ratio: float = 0.05
    exceedance_rate: float = 0.05
    relative_log_loss: float = 2e-4
    horizon_steps: int = 1000

    def validated(self) -> Tolerance:
        """Return self if every number makes sense.

        Raises:
            ConfigurationError: Naming the field, its value and its limits.
        """
        limits = {
            "sqnr_db": (-50.0, 200.0),
            "row_sqnr_db_p05": (-50.0, 200.0),
            "underflow_share_worst_group": (0.0, 1.0),
            "saturation_share": (0.0, 1.0),
            "gradient_bias": (0.0, 1.0),
            "gradient_noise_ratio": (0.0, 10.0),
            "exceedance_rate": (1e-4, 0.5),
            "relative_log_loss": (0.0, 1.0),
            "horizon_steps": (1, 10**9),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise ConfigurationError(
                    f"tolerance.{name} = {value!r} must lie in [{low}, {high}]; "
                    "see the [tolerance] section of loka.toml"
                )
        return self
