"""Replay results: every site and candidate kernel, with its errors, its time, or why not."""

from __future__ import annotations

import dataclasses
import enum
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loka_toolkit.artifacts import storage
from loka_toolkit.artifacts.schema import Column, ColumnType, TableSchema
from loka_toolkit.environment import Environment
from loka_toolkit.errors import ArtifactCorruptError

if TYPE_CHECKING:
    import pandas as pd

KIND = "loka-replay-results"


class Status(enum.StrEnum):
    """How a candidate fared on a workload."""

    OK = "ok"
    WRONG_NUMERICS = "wrong-numerics"
    UNSUPPORTED = "unsupported"
    KERNEL_ABSENT = "kernel-absent"
    FAILED_TO_COMPILE = "failed-to-compile"
    OUT_OF_MEMORY = "out-of-memory"
    CRASHED = "crashed"
    TIMED_OUT = "timed-out"


class ReplayRow(msgspec.Struct, frozen=True):
    """One workload under one candidate; see :data:`ROWS` for units."""

    site: str
    fqn: str
    call: int
    role: str
    batch: int
    m: int
    n: int
    k: int
    dtype: str
    candidate: str
    library: str
    version: str | None
    recipe: str
    emulated: bool
    status: Status
    detail: str | None
    kernel_sqnr_db: float | None
    total_sqnr_db: float | None
    emulation_sqnr_db: float | None
    excess_error: float | None
    draws: int
    latency_us: float | None
    latency_us_p10: float | None
    latency_us_p90: float | None
    cast_a_us: float | None
    cast_b_us: float | None
    gemm_us: float | None
    repetitions: int
    inputs: str
    kernel_ran: str | None
    chip: str
    workload_digest: str


_T = ColumnType
ROWS = TableSchema(
    "replay",
    1,
    (
        Column("site", _T.STRING, "site name"),
        Column("fqn", _T.STRING, "module path"),
        Column("call", _T.INT32, "index of the product in the module"),
        Column("role", _T.STRING, "fwd, dgrad, wgrad, grad_a or grad_b"),
        Column("batch", _T.INT64, "number of products"),
        Column("m", _T.INT64, "rows of the output"),
        Column("n", _T.INT64, "columns of the output"),
        Column("k", _T.INT64, "contraction length"),
        Column("dtype", _T.STRING, "dtype of operands and output"),
        Column("candidate", _T.STRING, "candidate name"),
        Column("library", _T.STRING, "library that holds the kernel"),
        Column("version", _T.STRING, "its version; null if absent", True),
        Column("recipe", _T.STRING, "recipe name"),
        Column("emulated", _T.BOOL, "arithmetic emulated; never enters a table"),
        Column("status", _T.STRING, "ok, or why not"),
        Column("detail", _T.STRING, "one sentence where the status is not ok", True),
        Column("kernel_sqnr_db", _T.FLOAT64, "against float64 on the de-quantized operands", True),
        Column("total_sqnr_db", _T.FLOAT64, "against float64 on the original operands", True),
        Column("emulation_sqnr_db", _T.FLOAT64, "the recipe's emulation, same draw", True),
        Column("excess_error", _T.FLOAT64, "total relative error over the emulation's", True),
        Column("draws", _T.INT64, "input draws judged"),
        Column("latency_us", _T.FLOAT64, "median of casts and product together", True),
        Column("latency_us_p10", _T.FLOAT64, "10 % quantile", True),
        Column("latency_us_p90", _T.FLOAT64, "90 % quantile", True),
        Column("cast_a_us", _T.FLOAT64, "median, cast of A alone", True),
        Column("cast_b_us", _T.FLOAT64, "median, cast of B alone", True),
        Column("gemm_us", _T.FLOAT64, "median, product alone", True),
        Column("repetitions", _T.INT64, "timed repetitions"),
        Column("inputs", _T.STRING, "moments, or the reason for anything else"),
        Column("kernel_ran", _T.STRING, "the kernel seen to run, where it can be seen", True),
        Column("chip", _T.STRING, "chip it ran on"),
        Column("workload_digest", _T.STRING, "identifies workload, candidate and policy"),
    ),
)


class ReplayFacts(msgspec.Struct, frozen=True):
    """What holds for the whole replay.

    Attributes:
        created: UTC, ISO 8601.
        environment: Where it ran.
        trace_digest: SHA-256 of the trace.
        config: Arguments of the replay.
        policy: Name of the measurement policy.
        policy_description: What it does, in one sentence.
        complete: Whether every workload was visited.
    """

    created: str
    environment: Environment
    trace_digest: str
    config: dict[str, Any]
    policy: str
    policy_description: str
    complete: bool


@dataclasses.dataclass(frozen=True)
class ReplayResults:
    """The rows of one replay.

    Attributes:
        rows: One per workload and candidate.
        facts: What holds for all of them.
    """

    rows: tuple[ReplayRow, ...]
    facts: ReplayFacts

    def save(self, path: str | Path) -> Path:
        """Write the results to one Parquet file, atomically, over any older ones."""
        path = Path(path)
        table = storage.table_from_rows(ROWS, [_row_of(row) for row in self.rows])
        storage.write_table(path, table, ROWS, kind=KIND, payload=self.facts)
        return path

    @classmethod
    def load(cls, path: str | Path) -> ReplayResults:
        """Read results.

        Raises:
            ArtifactError: If they are missing, damaged, foreign or newer.
        """
        path = Path(path)
        table, payload = storage.read_table(path, ROWS, kind=KIND)
        facts = storage.decode_payload(path, payload, ReplayFacts)
        try:
            rows = tuple(msgspec.convert(row, type=ReplayRow) for row in table.to_pylist())
        except msgspec.ValidationError as error:
            raise ArtifactCorruptError(f"{path} has a damaged row: {error}") from None
        return cls(rows=rows, facts=facts)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the contents, in hexadecimal."""
        return storage.digest_structs(self.facts, self.rows)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per workload and candidate, columns as in :data:`ROWS`.

        Raises:
            MissingDependencyError: If pandas is absent.
        """
        return storage.frame_from_rows(ROWS, [_row_of(row) for row in self.rows])


def _row_of(row: ReplayRow) -> dict[str, Any]:
    return {**msgspec.structs.asdict(row), "status": row.status.value}
