"""The trace of a training run: a directory with a manifest and one table per kind of fact.

    RUN/manifest.json                 written by rank 0; manifest-rank00001.json by rank 1, ...
    RUN/sites/*.parquet               what was multiplied or normalized, once per shape
    RUN/steps/*.parquet               one row per sampled step
    RUN/operands/*.parquet            statistics of every operand at every sampled step
    RUN/errors/*.parquet              what-if errors and impact per recipe at every sampled step
    RUN/moments/*.parquet             moments accumulated so far, for drawing realistic inputs

Every flush is a complete Parquet file renamed into place, so a killed run leaves a readable trace.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loka_toolkit.artifacts import storage
from loka_toolkit.artifacts.schema import Column, ColumnType, TableSchema
from loka_toolkit.environment import Environment
from loka_toolkit.errors import ArtifactCorruptError, ArtifactMissingError, NoEvidenceError

if TYPE_CHECKING:
    import pyarrow as pa

KIND = "loka-trace"
SCHEMA_VERSION = 1

HISTOGRAM_LOG2_MIN = -80.0
HISTOGRAM_BINS = 256
"""Half-octave bins of log2|x|; bin i covers [MIN + i/2, MIN + (i+1)/2), up to 2**48; the end bins
also hold what lies beyond them. Zeros and non-finite values are in no bin."""

AMAX_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Probabilities of the quantile lists of row, column and block amax and of row norms."""

NORM_LEVELS = (
    0.0,
    *(2.0**-k for k in range(16, 6, -1)),
    *(i / 64 for i in range(1, 64)),
    *(1.0 - 2.0**-k for k in range(7, 17)),
    1.0,
)
"""Probabilities of ``norm_quantiles``: norms of gradient rows have heavy tails, on both sides."""

MARGINAL_OCTAVES = (-40, 40)
"""Powers of two between which marginal counts tell magnitudes apart; the outermost bins hold what
lies beyond, but for magnitudes below 2**-40, which count as zeros."""
MARGINAL_BINS = 4 * (MARGINAL_OCTAVES[1] - MARGINAL_OCTAVES[0]) + 1
"""Bins per feature in ascending order of the value: negative values from the largest magnitude
down, zero, positive values. Every octave is split in two at 1.5 times its lower edge."""

_T = ColumnType

SITES = TableSchema(
    "sites",
    2,
    (
        Column("site", _T.STRING, "site name, FQN#CALL:ROLE"),
        Column("fqn", _T.STRING, "module path without wrapper prefixes"),
        Column("call", _T.INT32, "index of the product in the module within one model call"),
        Column("role", _T.STRING, "fwd, dgrad, wgrad, grad_a, grad_b, bwd or norm"),
        Column("op", _T.STRING, "aten operator, for example aten.addmm.default"),
        Column("batch", _T.INT64, "number of products (1 unless batched)"),
        Column("m", _T.INT64, "rows of the output; of a norm: rows normalized"),
        Column("n", _T.INT64, "columns of the output; of a norm: its width"),
        Column("k", _T.INT64, "contraction length; of a norm: 0"),
        Column("dtype_a", _T.STRING, "dtype of the left factor, for example float32"),
        Column("dtype_b", _T.STRING, "dtype of the right factor"),
        Column("dtype_out", _T.STRING, "dtype of the output"),
        Column("layout_a", _T.STRING, "row, column or strided"),
        Column("layout_b", _T.STRING, "row, column or strided"),
        Column("module_type", _T.STRING, "class name of the module, for example Linear"),
        Column("weight", _T.STRING, "FQN of the parameter multiplied; null without one", True),
        Column("norm_after", _T.STRING, "FQN of the norm fed by the output, if seen", True),
        Column("dispatchable", _T.BOOL, "whether a kernel can stand in for it at all"),
        Column("first_step", _T.INT64, "step at which this shape was first seen"),
        Column("not_dispatchable_reason", _T.STRING, "why no kernel can, else null", True, 2),
        Column("flops", _T.FLOAT64, "FLOPs of one execution; null in old traces", True, 2),
        Column("executions", _T.INT64, "runs in that step, recomputed ones included", False, 2, 1),
        Column("recompute", _T.INT64, "of these, by activation checkpointing", False, 2, 0),
    ),
)

STEPS = TableSchema(
    "steps",
    2,
    (
        Column("step", _T.INT64, "optimizer step, counted from 0"),
        Column("rank", _T.INT32, "rank that wrote the row"),
        Column("status", _T.STRING, "recorded, nonfinite or failed"),
        Column("reason", _T.STRING, "why it was not recorded; null if it was", True),
        Column("loss", _T.FLOAT64, "loss in the units of the training script, if known", True),
        Column("mean_loss", _T.FLOAT64, "data loss per example, no regularizer, if known", True),
        Column("examples", _T.INT64, "examples in the step, if known", True),
        Column("reduction", _T.STRING, "mean or sum, if known", True),
        Column("loss_scale", _T.FLOAT64, "factor by which the loss was scaled before backward"),
        Column("seconds_recording", _T.FLOAT64, "time spent in the recorder during the step"),
        Column("gemm_flops_seen", _T.FLOAT64, "FLOPs of GEMMs recorded as sites and judged"),
        Column("gemm_flops_unseen", _T.FLOAT64, "FLOPs of GEMMs that no site accounts for"),
        Column("unseen_reason", _T.STRING, "JSON object: reason -> FLOPs; null if none", True),
        Column("gemm_flops_not_judged", _T.FLOAT64, "of sites without errors", False, 2, 0.0),
        Column("not_judged_reason", _T.STRING, "JSON object likewise", True, 2),
        Column("gemm_flops_repeated", _T.FLOAT64, "of sites that ran again", False, 2, 0.0),
        Column("repeated_reason", _T.STRING, "JSON object likewise", True, 2),
    ),
)

OPERANDS = TableSchema(
    "operands",
    1,
    (
        Column("step", _T.INT64, "optimizer step"),
        Column("rank", _T.INT32, "rank that wrote the row"),
        Column("site", _T.STRING, "site at which the operand was first multiplied"),
        Column("operand", _T.STRING, "x, w, g, a, b, input or output"),
        Column("dtype", _T.STRING, "dtype, for example float32"),
        Column("numel", _T.INT64, "elements"),
        Column("width", _T.INT64, "length of the last logical dimension"),
        Column("mean", _T.FLOAT64, "mean of the finite elements; null if there are none", True),
        Column("variance", _T.FLOAT64, "population variance of the finite elements", True),
        Column("amax", _T.FLOAT64, "largest finite magnitude; null if there is none", True),
        Column("smallest_nonzero", _T.FLOAT64, "smallest non-zero finite magnitude", True),
        Column("zero_share", _T.FLOAT64, "share of elements equal to 0 or -0"),
        Column("nonfinite_count", _T.INT64, "Inf and NaN elements"),
        Column("histogram_log2", _T.INT64_LIST, "256 half-octave bins of log2|x|"),
        Column("row_amax_quantiles", _T.FLOAT32_LIST, "amax over rows at AMAX_QUANTILES"),
        Column("column_amax_quantiles", _T.FLOAT32_LIST, "amax over columns at AMAX_QUANTILES"),
        Column("block128_amax_quantiles", _T.FLOAT32_LIST, "amax over 1x128 blocks"),
    ),
)

ERRORS = TableSchema(
    "errors",
    1,
    (
        Column("step", _T.INT64, "optimizer step"),
        Column("rank", _T.INT32, "rank that wrote the row"),
        Column("site", _T.STRING, "site name"),
        Column("recipe", _T.STRING, "recipe name"),
        Column("relative_frobenius", _T.FLOAT64, "|error|_F / |output|_F; null if 0/0", True),
        Column("sqnr_db", _T.FLOAT64, "-20 log10 of relative_frobenius, at most 200 dB", True),
        Column("row_sqnr_db_p05", _T.FLOAT64, "5th percentile of the output rows' SQNR", True),
        Column("element_error_median", _T.FLOAT64, "median of |error| / |output|", True),
        Column("element_error_mean", _T.FLOAT64, "mean of the same (MERE)", True),
        Column("underflow_share", _T.FLOAT64, "share of non-zeros flushed, both operands"),
        Column("underflow_share_worst_group", _T.FLOAT64, "the same in the worst column group"),
        Column("underflow_worst_group", _T.STRING, "operand[first:last column] of it", True),
        Column("saturation_share", _T.FLOAT64, "clipped share, the larger of two operands"),
        Column("scale_a", _T.FLOAT64, "decode scale of A; null if one per row", True),
        Column("scale_b", _T.FLOAT64, "decode scale of B; null if one per column", True),
        Column("impact_first_order", _T.FLOAT64, "sum(g e) in units of the mean loss", True),
        Column("impact_second_order", _T.FLOAT64, "Gauss-Newton or Fisher term, same units", True),
        Column("impact_standard_error", _T.FLOAT64, "of the first order, from sampling rows", True),
        Column("impact_status", _T.STRING, "ok, beyond-validity or unknown"),
        Column("impact_reason", _T.STRING, "why impact is null or beyond validity", True),
        Column("gradient_bias", _T.FLOAT64, "<dG,G>/<G,G> of the gradient", True),
        Column("gradient_noise_ratio", _T.FLOAT64, "|dG|^2 / trace of its covariance", True),
        Column("gradient_reason", _T.STRING, "why the gradient columns are null", True),
        Column("sampled_rows", _T.INT64, "output rows on which the error was computed"),
        Column("sampled_columns", _T.INT64, "output columns on which it was computed"),
    ),
)

MOMENTS = TableSchema(
    "moments",
    3,
    (
        Column("rank", _T.INT32, "rank that wrote the row"),
        Column("site", _T.STRING, "site at which the operand was first multiplied"),
        Column("operand", _T.STRING, "x, w, g, a or b; ab jointly; gx the cross moment"),
        Column("count", _T.INT64, "samples accumulated; of a spectrum: rows of w"),
        Column("steps", _T.INT64, "sampled steps accumulated; of a spectrum: 1"),
        Column("width", _T.INT64, "length of the last logical dimension; of ab, gx: of both"),
        Column("kind", _T.STRING, "full, diagonal, low-rank, spectrum, tied or cross; see below"),
        Column("mean", _T.FLOAT32_LIST, "mean of each feature; of a cross: singular values"),
        Column("covariance", _T.FLOAT32_LIST, "row-major features x features, or the diagonal"),
        Column("row_norm_quantiles", _T.FLOAT32_LIST, "Euclidean row norms at AMAX_QUANTILES"),
        Column("zero_share", _T.FLOAT64, "share of elements equal to zero"),
        Column("sample_rows", _T.INT64, "operand rows that make one sample", False, 2, 1),
        Column("slot", _T.INT32, "which of every `slots` products of a batch", False, 2, 0),
        Column("slots", _T.INT32, "kinds of products told apart by their place", False, 2, 1),
        Column(
            "factors", _T.FLOAT32_LIST, "row-major [r, features]; null if there are none", True, 2
        ),
        Column("row_squares", _T.FLOAT32_LIST, "of a spectrum: residual of each row", True, 2),
        Column("norm_quantiles", _T.FLOAT32_LIST, "sample norms at NORM_LEVELS", True, 2),
        Column("marginal_counts", _T.FLOAT32_LIST, "weights, features x MARGINAL_BINS", True, 2),
        Column("marginal_extremes", _T.FLOAT32_LIST, "least, then largest values", True, 2),
        Column("product_square", _T.FLOAT64, "cross: mean of |g^T x|^2 / rows^2", True, 2),
        Column("norm_product", _T.FLOAT64, "cross: mean of |g|^2 |x|^2 over rows", True, 2),
        Column("norm_correlation", _T.FLOAT64, "cross: rank correlation of |g|, |x|", True, 2),
        Column("equal_row_shares", _T.FLOAT32_LIST, "see below; null in older traces", True, 3),
    ),
)
"""What replay draws from; late steps weigh more than early ones. A sample is a row of the operand
or, where ``sample_rows`` > 1, a whole matrix of a batched product; its features are its elements.

- ``full``, ``diagonal``: the population covariance of the features, or its diagonal;
- ``low-rank``: the diagonal, exact, and factors F with F^T F close to the covariance;
- ``spectrum``, of the last w[O, I]: factors [r, O + I] hold a singular pair each, both sides scaled
  by the root of the singular value and of random sign, so that w w^T and w^T w are kept and no w;
  ``covariance`` and ``row_squares`` are the mean squares of the columns and rows of the rest;
- ``tied``: b is the transpose of a, and drawn as such;
- ``cross``: the mean of g x^T over rows: factors [r, O + I] hold its singular pairs.

``equal_row_shares`` has, for each row of a sample, the share of samples in which its elements are
all equal and not zero: such a row has no error under a scale of its own.
"""

TABLES: tuple[TableSchema, ...] = (SITES, STEPS, OPERANDS, ERRORS, MOMENTS)


class Event(msgspec.Struct, frozen=True):
    """Something a reader of the trace must know.

    Attributes:
        kind: For example ``schedule-never-active``, ``nonfinite-step``, ``write-failed``.
        step: Step at which it happened, or null.
        message: One sentence.
        count: How often it happened.
    """

    kind: str
    message: str
    step: int | None = None
    count: int = 1


class RunStatus(msgspec.Struct, frozen=True):
    """How far a recording got.

    Attributes:
        closed: Whether the recorder was closed; false after a kill.
        steps_seen: Calls of ``step()``.
        steps_recorded: Steps that left rows.
    """

    closed: bool = False
    steps_seen: int = 0
    steps_recorded: int = 0


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the trace says of itself.

    Attributes:
        kind: Always ``loka-trace``.
        schema_version: Version of this layout.
        created: UTC, ISO 8601.
        rank: Rank of the writer.
        world_size: Number of ranks.
        environment: Where it ran.
        config: Arguments of the recorder.
        recipes: Names of the recipes answered for.
        status: How far it got.
        events: What a reader must know.
    """

    kind: str
    schema_version: int
    created: str
    rank: int
    world_size: int
    environment: Environment
    config: dict[str, Any]
    recipes: tuple[str, ...]
    status: RunStatus
    events: tuple[Event, ...] = ()


def manifest_name(rank: int) -> str:
    """Return the file name of a rank's manifest."""
    return "manifest.json" if rank == 0 else f"manifest-rank{rank:05d}.json"


@dataclasses.dataclass(frozen=True)
class Trace:
    """A trace opened for reading.

    Attributes:
        path: Its directory.
        manifests: One per rank, rank 0 first.
    """

    path: Path
    manifests: tuple[Manifest, ...]

    @classmethod
    def open(cls, path: str | Path) -> Trace:
        """Open the trace in a directory.

        Raises:
            ArtifactMissingError: If there is no such directory or no manifest in it.
            ArtifactCorruptError: If a manifest is not one of a trace.
            ArtifactVersionError: If it was written by a newer version.
        """
        path = Path(path)
        if not path.is_dir():
            raise ArtifactMissingError(f"no trace at {path}: not a directory")
        files = sorted(path.glob("manifest*.json"))
        if not files:
            raise ArtifactMissingError(f"no trace at {path}: it holds no manifest.json")
        manifests = tuple(
            storage.read_json(file, Manifest, kind=KIND, newest=SCHEMA_VERSION) for file in files
        )
        return cls(path=path, manifests=tuple(sorted(manifests, key=lambda m: m.rank)))

    @property
    def manifest(self) -> Manifest:
        """The manifest of the lowest rank present."""
        return self.manifests[0]

    def table(self, schema: TableSchema) -> pa.Table:
        """Return all rows of one table, ranks concatenated; empty if nothing was flushed.

        Raises:
            ArtifactCorruptError: If a part is truncated or foreign.
            ArtifactVersionError: If a part was written by a newer schema.
        """
        return storage.read_parts(self.path / schema.name, schema)

    @property
    def sites(self) -> pa.Table:
        """The table ``sites``."""
        return self.table(SITES)

    @property
    def steps(self) -> pa.Table:
        """The table ``steps``."""
        return self.table(STEPS)

    @property
    def operands(self) -> pa.Table:
        """The table ``operands``."""
        return self.table(OPERANDS)

    @property
    def errors(self) -> pa.Table:
        """The table ``errors``."""
        return self.table(ERRORS)

    @property
    def moments(self) -> pa.Table:
        """The table ``moments``."""
        return self.table(MOMENTS)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over the names and contents of every file of the trace, in hexadecimal."""
        return storage.digest_directory(self.path)

    def require_evidence(self) -> None:
        """Check that something was recorded.

        Raises:
            NoEvidenceError: If not; the message says why.
        """
        if self.errors.num_rows:
            if not self.sites.num_rows:
                raise NoEvidenceError(
                    f"trace {self.path} holds errors but no sites: files below "
                    f"{self.path / SITES.name} are gone; record again"
                )
            return
        seen = sum(m.status.steps_seen for m in self.manifests)
        events = [event for m in self.manifests for event in m.events]
        events.sort(key=lambda event: event.kind != "schedule-never-active")  # the cause first
        reasons = [event.message for event in events]
        why = "; ".join(dict.fromkeys(reasons)) or "no step was flushed before the run ended"
        raise NoEvidenceError(f"trace {self.path} holds no errors ({seen} steps seen): {why}")


def check_histogram(values: list[int]) -> None:
    """Check the length of a stored histogram.

    Raises:
        ArtifactCorruptError: If it has not ``HISTOGRAM_BINS`` bins.
    """
    if len(values) != HISTOGRAM_BINS:
        raise ArtifactCorruptError(
            f"a histogram has {len(values)} bins where {HISTOGRAM_BINS} are expected"
        )
