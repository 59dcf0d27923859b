"""Table schemas as data, so that rooms can speak of columns without importing pyarrow."""

from __future__ import annotations

import dataclasses
import enum


class ColumnType(enum.StrEnum):
    """Storage types of columns; the values are pyarrow's names for them."""

    BOOL = "bool"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT32 = "float"
    FLOAT64 = "double"
    STRING = "string"
    FLOAT32_LIST = "list<item: float>"
    FLOAT64_LIST = "list<item: double>"
    INT64_LIST = "list<item: int64>"


@dataclasses.dataclass(frozen=True)
class Column:
    """One column: its name carries the unit.

    Attributes:
        name: Column name.
        type: Storage type.
        doc: What it holds; null values are explained here.
        nullable: Whether a value may be missing.
        since: Version of the table in which the column appeared.
        default: What a file of an older version is read as.
    """

    name: str
    type: ColumnType
    doc: str
    nullable: bool = False
    since: int = 1
    default: bool | int | float | str | None = None


@dataclasses.dataclass(frozen=True)
class TableSchema:
    """A table's columns, in order.

    Attributes:
        name: The table's name, also its directory inside a trace.
        version: Raised when a column is added, removed or changes its meaning.
        columns: The columns.
    """

    name: str
    version: int
    columns: tuple[Column, ...]

    @property
    def column_names(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return tuple(column.name for column in self.columns)
