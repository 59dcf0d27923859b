"""Reader for click rows in Criteo's layout: label, 13 counts, 26 hashed categories.

Reads the comma-separated samples with a header line and the tab-separated original without one.
Blank counts become NaN and blank categories the empty string: filling them is the model's business.
"""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loka_toolkit.errors import ArtifactCorruptError, ArtifactMissingError

DENSE_COLUMNS = tuple(f"I{i}" for i in range(1, 14))
CATEGORY_COLUMNS = tuple(f"C{i}" for i in range(1, 27))
_WIDTH = 1 + len(DENSE_COLUMNS) + len(CATEGORY_COLUMNS)


@dataclasses.dataclass(frozen=True)
class CriteoRows:
    """Rows of a Criteo file.

    Attributes:
        labels: float32 [rows], 0 or 1.
        dense: float32 [rows, 13], raw counts, NaN where blank.
        categories: str [rows, 26], empty where blank.
    """

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    categories: NDArray[np.str_]

    def encoded_categories(self) -> tuple[NDArray[np.int64], tuple[int, ...]]:
        """Return categories as indices [rows, 26] in sorted order, and the vocabulary sizes."""
        columns, sizes = [], []
        for column in self.categories.T:
            values, index = np.unique(column, return_inverse=True)
            columns.append(index.astype(np.int64))
            sizes.append(len(values))
        return np.stack(columns, axis=1), tuple(sizes)


def read_criteo(path: str | Path, limit: int | None = None) -> CriteoRows:
    """Read a Criteo file.

    Args:
        path: The file; a first line that begins with ``label`` is a header.
        limit: Read at most so many rows.

    Raises:
        ArtifactMissingError: If there is no such file.
        ArtifactCorruptError: If a line has not 40 fields or a field cannot be read; it is named.
    """
    path = Path(path)
    if not path.is_file():
        raise ArtifactMissingError(f"no Criteo file at {path}")
    labels: list[float] = []
    dense: list[list[float]] = []
    categories: list[list[str]] = []
    with path.open(newline="", encoding="utf-8") as handle:
        first = handle.readline()
        handle.seek(0)
        reader = csv.reader(handle, delimiter="\t" if "\t" in first else ",")
        for number, fields in enumerate(reader, start=1):
            if number == 1 and fields and fields[0] == "label":
                continue
            if limit is not None and len(labels) >= limit:
                break
            if len(fields) != _WIDTH:
                raise ArtifactCorruptError(
                    f"{path} line {number} has {len(fields)} fields; Criteo rows have {_WIDTH}"
                )
            try:
                labels.append(float(fields[0]))
                dense.append([float(v) if v else float("nan") for v in fields[1:14]])
            except ValueError as error:
                raise ArtifactCorruptError(f"{path} line {number}: {error}") from None
            categories.append(fields[14:])
    if not labels:
        raise ArtifactCorruptError(f"{path} holds no rows")
    return CriteoRows(
        labels=np.asarray(labels, np.float32),
        dense=np.asarray(dense, np.float32),
        categories=np.asarray(categories, np.str_),
    )
