from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loka_toolkit.artifacts import storage
from loka_toolkit.artifacts.schema import Column, ColumnType, TableSchema
from loka_toolkit.errors import (
    ArtifactCorruptError,
    ArtifactError,
    ArtifactExistsError,
    ArtifactMissingError,
    ArtifactUnwritableError,
    ArtifactVersionError,
)

ROOT = Path(__file__).resolve().parents[2]

FACTS = TableSchema(
    "facts",
    3,
    (
        Column("step", ColumnType.INT64, "step"),
        Column("site", ColumnType.STRING, "site"),
        Column("value", ColumnType.FLOAT64, "value", nullable=True),
        Column("bins", ColumnType.INT64_LIST, "bins"),
    ),
)
KIND = storage.part_kind(FACTS)

rows = st.lists(
    st.fixed_dictionaries(
        {
            "step": st.integers(-(2**63), 2**63 - 1),
            "site": st.text(st.characters(codec="utf-8"), max_size=20),
            "value": st.none() | st.floats(),
            "bins": st.lists(st.integers(0, 2**62), max_size=5),
        }
    ),
    max_size=8,
)


class Payload(msgspec.Struct, frozen=True):
    note: str


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str
    schema_version: int
    numbers: tuple[float, ...]


def some_rows(count: int = 4, first: int = 0) -> pa.Table:
    return storage.table_from_rows(
        FACTS,
        [
            {"step": first + i, "site": f"s{i}", "value": None if i % 2 else i / 3, "bins": [i]}
            for i in range(count)
        ],
    )


@given(content=rows)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tables_come_back_as_they_were_written(tmp_path, content):
    path = tmp_path / "t.parquet"
    table = storage.table_from_rows(FACTS, content)
    storage.write_table(path, table, FACTS, kind=KIND, payload=Payload("x"))
    back, payload = storage.read_table(path, FACTS, kind=KIND)
    ordered = [{name: row[name] for name in FACTS.column_names} for row in content]
    assert repr(back.to_pylist()) == repr(ordered)  # repr, so that NaN equals itself
    assert storage.decode_payload(path, payload, Payload) == Payload("x")
    assert list(tmp_path.iterdir()) == [path]


def test_columns_must_be_those_of_the_schema():
    with pytest.raises(ValueError, match="bins"):
        storage.table_from_columns(FACTS, {"step": [1], "site": ["a"], "value": [0.0]})


def test_every_truncation_is_one_clear_error(tmp_path):
    path = tmp_path / "t.parquet"
    storage.write_table(path, some_rows(), FACTS, kind=KIND)
    content = path.read_bytes()
    for length in range(0, len(content), max(1, len(content) // 60)):
        path.write_bytes(content[:length])
        with pytest.raises(ArtifactCorruptError, match=r"t\.parquet") as caught:
            storage.read_table(path, FACTS, kind=KIND)
        assert "\n" not in str(caught.value)


def test_flipped_bytes_never_change_a_value_in_silence(tmp_path):
    path = tmp_path / "t.parquet"
    table = some_rows(40)
    storage.write_table(path, table, FACTS, kind=KIND)
    content = bytearray(path.read_bytes())
    for position in range(4, len(content), max(1, len(content) // 80)):
        damaged = bytearray(content)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            back, _ = storage.read_table(path, FACTS, kind=KIND)
        except ArtifactError as error:
            assert "t.parquet" in str(error)
        else:
            assert back.equals(table)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda p: None, ArtifactMissingError, "no loka"),
        (lambda p: p.write_bytes(b""), ArtifactCorruptError, "empty"),
        (lambda p: p.write_text("a,b\n1,2\n"), ArtifactCorruptError, "not a readable"),
        (
            lambda p: pq.write_table(pa.table({"a": [1]}), p),
            ArtifactCorruptError,
            "not one of loka_toolkit",
        ),
        (
            lambda p: storage.write_table(p, some_rows(), FACTS, kind="loka-trace/other"),
            ArtifactCorruptError,
            "loka-trace/other",
        ),
        (
            lambda p: storage.write_table(
                p, some_rows(), TableSchema("facts", 4, FACTS.columns), kind=KIND
            ),
            ArtifactVersionError,
            "schema 4.*reads up to 3.*upgrade",
        ),
    ],
)
def test_files_that_cannot_be_used_say_why(tmp_path, make, error, words):
    path = tmp_path / "t.parquet"
    make(path)
    with pytest.raises(error, match=words):
        storage.read_table(path, FACTS, kind=KIND)


def test_a_missing_column_is_named(tmp_path):
    path = tmp_path / "t.parquet"
    narrow = TableSchema("facts", 3, FACTS.columns[:2])
    storage.write_table(path, some_rows().select(["step", "site"]), narrow, kind=KIND)
    with pytest.raises(ArtifactCorruptError, match="value, bins"):
        storage.read_table(path, FACTS, kind=KIND)


def test_json_is_strict_and_versioned(tmp_path):
    path = tmp_path / "d.json"
    document = Document("loka-doc", 1, (0.1, 2.0))
    storage.write_json(path, document)
    assert storage.read_json(path, Document, kind="loka-doc", newest=1) == document
    cases = {
        b"": "empty",
        b"{": "not a loka-doc",
        b"\xff\xfe": "not a loka-doc",
        b"[]": "not a loka-doc",
        b'{"kind": "other", "schema_version": 1}': "other",
        b'{"kind": "loka-doc", "schema_version": 2}': "schema 2",
        b'{"kind": "loka-doc", "schema_version": 1}': "numbers",
        b'{"kind": "loka-doc", "schema_version": 1, "numbers": [], "extra": 1}': "extra",
        b'{"kind": "loka-doc", "schema_version": 1, "numbers": ["x"]}': "damaged",
    }
    for content, words in cases.items():
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match=words):
            storage.read_json(path, Document, kind="loka-doc", newest=1)


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "d.json"
    storage.write_json(path, Document("loka-doc", 1, (1.0,)))
    before = path.read_bytes()

    def full_disk(scratch: Path, content: bytes) -> None:
        scratch.write_bytes(content[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "_write_bytes", full_disk)
    with pytest.raises(OSError, match="No space left"):
        storage.write_json(path, Document("loka-doc", 1, (2.0,)))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a POSIX system")
def test_a_really_full_device_leaves_what_was_there(tmp_path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full here")

    def write_to_full(scratch: Path) -> None:
        scratch.symlink_to(full)
        storage._write_bytes(scratch, b"x" * 100_000)

    path = tmp_path / "d.json"
    path.write_text("before")
    with pytest.raises(OSError, match="No space left"):
        storage.write_atomically(path, write_to_full)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_overwriting_must_be_asked_for(tmp_path):
    path = tmp_path / "x"
    storage.ensure_writable(path, force=False)
    path.write_text("x")
    storage.ensure_writable(path, force=True)
    with pytest.raises(ArtifactExistsError, match="--force"):
        storage.ensure_writable(path, force=False)


def test_an_output_that_cannot_be_written_is_noticed_before_the_work(tmp_path):
    with pytest.raises(ArtifactUnwritableError, match="is a directory"):
        storage.ensure_writable(tmp_path, force=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactUnwritableError, match="cannot write"):
        storage.ensure_writable(tmp_path / "file" / "below", force=False)
    storage.ensure_writable(tmp_path / "new" / "folder" / "x", force=False)
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def write_parts(directory: Path, ranks: int, parts: int) -> None:
    for rank in range(ranks):
        for part in range(parts):
            table = some_rows(2, first=1000 * rank + 10 * part)
            storage.write_table(storage.part_path(directory, rank, part), table, FACTS, kind=KIND)


def test_compaction_changes_nothing_that_is_read(tmp_path):
    write_parts(tmp_path, ranks=2, parts=5)
    before = sorted(storage.read_parts(tmp_path, FACTS).column("step").to_pylist())
    assert len(before) == 20
    storage.compact_parts(tmp_path, FACTS, rank=0)
    storage.compact_parts(tmp_path, FACTS, rank=0)
    assert len(list(tmp_path.glob("rank00000-*"))) == 1
    assert len(list(tmp_path.glob("rank00001-*"))) == 5
    assert sorted(storage.read_parts(tmp_path, FACTS).column("step").to_pylist()) == before
    storage.write_table(storage.part_path(tmp_path, 0, 5), some_rows(1, 999), FACTS, kind=KIND)
    storage.compact_parts(tmp_path, FACTS, rank=0)
    after = sorted(storage.read_parts(tmp_path, FACTS).column("step").to_pylist())
    assert after == sorted([*before, 999])


def test_a_compaction_killed_anywhere_loses_and_doubles_nothing(tmp_path, monkeypatch):
    write_parts(tmp_path, ranks=1, parts=4)
    before = sorted(storage.read_parts(tmp_path, FACTS).column("step").to_pylist())
    real_unlink = Path.unlink
    for survive in range(4):
        removed = []

        def unlink(self: Path, missing_ok: bool = False, budget=survive, removed=removed) -> None:
            if self.suffix == ".parquet":
                if len(removed) == budget:
                    raise KeyboardInterrupt
                removed.append(self)
            real_unlink(self, missing_ok=missing_ok)

        monkeypatch.setattr(Path, "unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            storage.compact_parts(tmp_path, FACTS, rank=0)
        monkeypatch.setattr(Path, "unlink", real_unlink)
        assert sorted(storage.read_parts(tmp_path, FACTS).column("step").to_pylist()) == before
        for file in tmp_path.glob("*.parquet"):
            file.unlink()
        write_parts(tmp_path, ranks=1, parts=4)


def test_a_foreign_file_among_the_parts_is_named(tmp_path):
    write_parts(tmp_path, ranks=1, parts=1)
    (tmp_path / "rank0.parquet").write_bytes(b"x")
    with pytest.raises(ArtifactCorruptError, match=r"rank0\.parquet"):
        storage.read_parts(tmp_path, FACTS)


def test_killed_in_mid_write_every_complete_part_is_read(tmp_path):
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from loka_toolkit.artifacts import storage
        from loka_toolkit.artifacts.trace import STEPS

        directory = Path(sys.argv[1])
        row = dict(step=0, rank=0, status="recorded", reason=None, loss=0.5, mean_loss=0.5,
                   examples=8, reduction="mean", loss_scale=1.0, seconds_recording=0.0,
                   gemm_flops_seen=1.0, gemm_flops_unseen=0.0, unseen_reason=None)
        for part in range(10_000):
            table = storage.table_from_rows(STEPS, [{**row, "step": part}] * 200)
            storage.write_table(storage.part_path(directory, 0, part), table, STEPS,
                                kind=storage.part_kind(STEPS))
            print(part, flush=True)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    with process, process.stdout as lines:
        acknowledged = -1
        for line in lines:
            acknowledged = int(line)
            if acknowledged == 12:
                process.kill()
                break
        acknowledged = max([acknowledged, *(int(rest) for rest in lines)])
    from loka_toolkit.artifacts.trace import STEPS

    steps = set(storage.read_parts(tmp_path, STEPS).column("step").to_pylist())
    assert set(range(acknowledged + 1)) <= steps
    assert max(steps) <= acknowledged + 1


def test_digests_see_names_and_contents(tmp_path):
    (tmp_path / "a").write_text("1")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b").write_text("2")
    first = storage.digest_directory(tmp_path)
    (tmp_path / "sub" / "b").write_text("3")
    second = storage.digest_directory(tmp_path)
    (tmp_path / "sub" / "b").rename(tmp_path / "sub" / "c")
    assert len({first, second, storage.digest_directory(tmp_path)}) == 3


def test_a_table_of_an_older_version_is_read_with_the_defaults_of_later_columns(tmp_path):
    newer = TableSchema(
        "facts",
        4,
        (
            *FACTS.columns,
            Column("executions", ColumnType.INT64, "runs", since=4, default=1),
            Column("why", ColumnType.STRING, "reason", nullable=True, since=4),
        ),
    )
    row = {"step": 7, "site": "a#0:fwd", "value": 1.5, "bins": [1]}
    path = storage.part_path(tmp_path, 0, 0)
    storage.write_table(path, storage.table_from_rows(FACTS, [row]), FACTS, kind=KIND)
    assert storage.read_parts(tmp_path, newer).to_pylist() == [
        {**row, "executions": 1, "why": None}
    ]


def test_a_table_that_lacks_a_column_of_its_own_version_is_corrupt(tmp_path):
    newer = TableSchema(
        "facts", 3, (*FACTS.columns, Column("runs", ColumnType.INT64, "", since=2, default=1))
    )
    row = {"step": 7, "site": "a#0:fwd", "value": 1.5, "bins": [1]}
    path = storage.part_path(tmp_path, 0, 0)
    storage.write_table(path, storage.table_from_rows(FACTS, [row]), FACTS, kind=KIND)
    with pytest.raises(ArtifactCorruptError, match="lacks the columns runs"):
        storage.read_parts(tmp_path, newer)


def test_a_row_may_leave_out_what_older_versions_lack(tmp_path):
    schema = TableSchema(
        "facts", 2, (Column("step", ColumnType.INT64, ""),
                     Column("runs", ColumnType.INT64, "", since=2, default=1))
    )  # fmt: skip
    rows = [{"step": 1}, {"step": 2, "runs": 5}]
    assert storage.table_from_rows(schema, rows)["runs"].to_pylist() == [1, 5]
    with pytest.raises(KeyError):
        storage.table_from_rows(schema, [{"runs": 5}])
