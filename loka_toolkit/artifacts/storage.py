"""The only reader and writer of Parquet and JSON; everything is written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from loka_toolkit.artifacts.schema import Column, ColumnType, TableSchema
from loka_toolkit.errors import (
    ArtifactCorruptError,
    ArtifactExistsError,
    ArtifactMissingError,
    ArtifactUnwritableError,
    ArtifactVersionError,
    MissingDependencyError,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_METADATA_KEY = b"loka"
_PART = re.compile(r"^rank(?P<rank>\d+)-(?P<first>\d+)(-(?P<last>\d+))?\.parquet$")


class _Header(msgspec.Struct):
    kind: str
    schema_version: int


class TableHeader(msgspec.Struct, frozen=True):
    """What a Parquet file says of itself, in its schema metadata.

    Attributes:
        kind: For example ``loka-trace/errors`` or ``loka-safety-map``.
        schema_version: Version of the columns.
        payload: JSON object of the artifact's own facts.
    """

    kind: str
    schema_version: int
    payload: msgspec.Raw = msgspec.Raw(b"{}")


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file beside ``path`` with ``write``, sync it, and rename it into place.

    On failure nothing is left behind and whatever stood at ``path`` still stands.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        write(scratch)
        with scratch.open("rb") as handle:
            os.fsync(handle.fileno())
        scratch.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            scratch.unlink()


def ensure_writable(path: Path, *, force: bool) -> None:
    """Check that an output may be written, before the work that makes it; its folder is made.

    Raises:
        ArtifactExistsError: If something is there already and ``force`` is false.
        ArtifactUnwritableError: If it is a directory, or its folder cannot be written.
    """
    if path.exists() and not force:
        raise ArtifactExistsError(f"{path} exists already; use --force to overwrite it")
    if path.is_dir():
        raise ArtifactUnwritableError(f"{path} is a directory; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ArtifactUnwritableError(f"cannot write {path}: {error.strerror or error}") from None


def write_json(path: Path, value: msgspec.Struct) -> None:
    """Write a struct as indented JSON, atomically."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    write_atomically(path, lambda scratch: _write_bytes(scratch, text))


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text, atomically."""
    write_atomically(path, lambda scratch: _write_bytes(scratch, text.encode()))


def read_json(path: Path, kind_of: type[_Struct], *, kind: str, newest: int) -> _Struct:
    """Read and validate a JSON artifact.

    Args:
        path: The file.
        kind_of: The struct it decodes to, strictly.
        kind: The value that its field ``kind`` must have.
        newest: The newest ``schema_version`` that this version reads.

    Raises:
        ArtifactMissingError: If there is no such file.
        ArtifactCorruptError: If it is truncated, empty or foreign.
        ArtifactVersionError: If it is newer than ``newest``.
    """
    content = _read_bytes(path)
    try:
        header = msgspec.json.decode(content, type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArtifactCorruptError(f"{path} is not a {kind} file: {error}") from None
    _check_header(path, header.kind, header.schema_version, kind=kind, newest=newest)
    try:
        return msgspec.json.decode(content, type=kind_of)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArtifactCorruptError(f"{path} is a damaged {kind} file: {error}") from None


def table_from_columns(schema: TableSchema, columns: Mapping[str, Sequence[Any]]) -> pa.Table:
    """Return a pyarrow table with exactly the columns and types of ``schema``.

    Raises:
        ValueError: If a column is missing or unknown, or a value does not fit its type.
    """
    import pyarrow as pa

    if set(columns) != set(schema.column_names):
        odd = sorted(set(columns) ^ set(schema.column_names))
        raise ValueError(f"columns of table {schema.name!r} do not match its schema: {odd}")
    arrow = arrow_schema(schema)
    return pa.table(
        {name: pa.array(columns[name], arrow.field(name).type) for name in arrow.names},
        schema=arrow,
    )


def table_from_rows(schema: TableSchema, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return a pyarrow table from one mapping per row; see :func:`table_from_columns`.

    A mapping may lack the columns that older versions of the table lack: they hold their default.
    """

    def values(column: Column) -> list[Any]:
        if column.since > 1:
            return [row.get(column.name, column.default) for row in rows]
        return [row[column.name] for row in rows]

    return table_from_columns(schema, {column.name: values(column) for column in schema.columns})


def frame_from_rows(schema: TableSchema, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a pandas frame with the columns of ``schema`` from one mapping per row.

    Raises:
        MissingDependencyError: If pandas is absent.
    """
    try:
        import pandas as pd
    except ImportError:
        raise MissingDependencyError("pandas", "analyze", "to_frame()") from None
    return pd.DataFrame(list(rows), columns=list(schema.column_names))


def arrow_schema(schema: TableSchema) -> pa.Schema:
    """Return the pyarrow schema of a table."""
    import pyarrow as pa

    types = {
        ColumnType.BOOL: pa.bool_(),
        ColumnType.INT32: pa.int32(),
        ColumnType.INT64: pa.int64(),
        ColumnType.FLOAT32: pa.float32(),
        ColumnType.FLOAT64: pa.float64(),
        ColumnType.STRING: pa.string(),
        ColumnType.FLOAT32_LIST: pa.list_(pa.float32()),
        ColumnType.FLOAT64_LIST: pa.list_(pa.float64()),
        ColumnType.INT64_LIST: pa.list_(pa.int64()),
    }
    return pa.schema([pa.field(c.name, types[c.type], nullable=c.nullable) for c in schema.columns])


def write_table(
    path: Path,
    table: pa.Table,
    schema: TableSchema,
    *,
    kind: str,
    payload: msgspec.Struct | None = None,
) -> None:
    """Write one Parquet file, atomically, with a header in its metadata.

    Args:
        path: Where.
        table: Rows, in the columns of ``schema``.
        schema: The schema, whose version goes into the header.
        kind: What the file is.
        payload: The artifact's own facts.
    """
    import pyarrow.parquet as pq

    raw = msgspec.Raw(msgspec.json.encode(payload)) if payload is not None else msgspec.Raw(b"{}")
    header = TableHeader(kind=kind, schema_version=schema.version, payload=raw)
    table = table.cast(arrow_schema(schema)).replace_schema_metadata(
        {_METADATA_KEY: msgspec.json.encode(header)}
    )
    write_atomically(
        path,
        lambda scratch: pq.write_table(
            table, scratch, compression="zstd", write_page_checksum=True
        ),
    )


def read_table(path: Path, schema: TableSchema, *, kind: str) -> tuple[pa.Table, msgspec.Raw]:
    """Read one Parquet file of ours; return its rows and its payload.

    Raises:
        ArtifactMissingError: If there is no such file.
        ArtifactCorruptError: If it is truncated, empty, foreign or lacks a column.
        ArtifactVersionError: If its schema is newer.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise ArtifactMissingError(f"no {kind} file at {path}")
    if path.stat().st_size == 0:
        raise ArtifactCorruptError(f"{path} is empty; expected a {kind} file")
    try:
        table = pq.ParquetFile(path, page_checksum_verification=True).read()
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: undecodable names
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ArtifactCorruptError(f"{path} is not a readable {kind} file: {first_line}") from None
    metadata = (table.schema.metadata or {}).get(_METADATA_KEY)
    if metadata is None:
        raise ArtifactCorruptError(f"{path} is a Parquet file, but not one of loka_toolkit")
    try:
        header = msgspec.json.decode(metadata, type=TableHeader)
    except msgspec.DecodeError as error:
        raise ArtifactCorruptError(f"{path} has a damaged header: {error}") from None
    _check_header(path, header.kind, header.schema_version, kind=kind, newest=schema.version)
    for column in schema.columns:
        if column.since > header.schema_version and column.name not in table.column_names:
            values = pa.repeat(pa.scalar(column.default), table.num_rows)
            table = table.append_column(column.name, values)
    missing = [name for name in schema.column_names if name not in table.column_names]
    if missing:
        raise ArtifactCorruptError(f"{path} lacks the columns {', '.join(missing)}")
    try:
        table = table.select(list(schema.column_names)).cast(arrow_schema(schema))
    except (pa.ArrowException, ValueError) as error:
        raise ArtifactCorruptError(f"{path} has a column of the wrong type: {error}") from None
    return table, header.payload


def decode_payload(path: Path, payload: msgspec.Raw, kind_of: type[_Struct]) -> _Struct:
    """Decode the payload of a Parquet file, strictly.

    Raises:
        ArtifactCorruptError: If it does not fit ``kind_of``.
    """
    try:
        return msgspec.json.decode(payload, type=kind_of)
    except msgspec.DecodeError as error:
        raise ArtifactCorruptError(f"{path} has a damaged header: {error}") from None


def part_path(directory: Path, rank: int, first: int, last: int | None = None) -> Path:
    """Return the name of a part: one flush, or a compaction of the flushes first to last."""
    tail = "" if last is None else f"-{last:06d}"
    return directory / f"rank{rank:05d}-{first:06d}{tail}.parquet"


def part_kind(schema: TableSchema) -> str:
    """Return the kind that the parts of a trace's table carry."""
    return f"loka-trace/{schema.name}"


def live_parts(directory: Path) -> list[Path]:
    """Return the parts to read, in order: those that a compaction covers are left out."""
    parts: list[tuple[int, int, int, Path]] = []
    for path in directory.glob("rank*.parquet"):
        match = _PART.match(path.name)
        if match is None:
            raise ArtifactCorruptError(f"{path} is not named like a part of a trace")
        first = int(match["first"])
        parts.append((int(match["rank"]), first, int(match["last"] or first), path))
    covering = [p for p in parts if p[1] != p[2]]

    def is_covered(part: tuple[int, int, int, Path]) -> bool:
        return any(
            c is not part and c[0] == part[0] and c[1] <= part[1] and part[2] <= c[2]
            for c in covering
        )

    return [part[3] for part in sorted(p for p in parts if not is_covered(p))]


def read_parts(directory: Path, schema: TableSchema) -> pa.Table:
    """Return the rows of all parts of a trace's table; no rows if there are no parts."""
    import pyarrow as pa

    kind = part_kind(schema)
    tables = [read_table(path, schema, kind=kind)[0] for path in live_parts(directory)]
    if not tables:
        return arrow_schema(schema).empty_table()
    return pa.concat_tables(tables)


def compact_parts(directory: Path, schema: TableSchema, rank: int) -> None:
    """Merge one rank's parts into one file; safe to be killed at any moment."""
    import pyarrow as pa

    parts = [p for p in live_parts(directory) if p.name.startswith(f"rank{rank:05d}-")]
    if len(parts) < 2:
        return
    kind = part_kind(schema)
    bounds = [_PART.match(part.name) for part in parts]
    first = min(int(b["first"]) for b in bounds if b)
    last = max(int(b["last"] or b["first"]) for b in bounds if b)
    merged = pa.concat_tables([read_table(part, schema, kind=kind)[0] for part in parts])
    write_table(part_path(directory, rank, first, last), merged, schema, kind=kind)
    for part in parts:
        part.unlink()


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    return hashlib.sha256(_read_bytes(path)).hexdigest()


def digest_structs(facts: msgspec.Struct, rows: Sequence[msgspec.Struct]) -> str:
    """Return the SHA-256 of an artifact's facts and rows, the same in memory and from disk."""
    total = hashlib.sha256(msgspec.json.encode(facts))
    for row in rows:
        total.update(msgspec.json.encode(row))
    return total.hexdigest()


def digest_directory(path: Path) -> str:
    """Return the SHA-256 over the relative names and contents of all files below a directory."""
    total = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file() and not p.name.endswith(".tmp")):
        total.update(file.relative_to(path).as_posix().encode())
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def _check_header(path: Path, kind_found: str, version: int, *, kind: str, newest: int) -> None:
    if kind_found != kind:
        raise ArtifactCorruptError(f"{path} is a {kind_found} file; expected a {kind} file")
    if version > newest:
        raise ArtifactVersionError(
            f"{path} has {kind} schema {version}; this version reads up to {newest}: "
            "upgrade loka-toolkit"
        )


def _read_bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ArtifactMissingError(f"no file at {path}") from None
    except OSError as error:
        raise ArtifactMissingError(f"cannot read {path}: {error.strerror}") from None
    if not content:
        raise ArtifactCorruptError(f"{path} is empty")
    return content


def _write_bytes(path: Path, content: bytes) -> None:
    with path.open("wb") as handle:
        handle.write(content)
