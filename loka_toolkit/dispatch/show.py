"""A table as plain rows, for printing; no pandas."""

from __future__ import annotations

from typing import Any

import msgspec

from loka_toolkit.artifacts.dispatch_table import DispatchTable


def table_rows(table: DispatchTable) -> list[dict[str, Any]]:
    """Return one row per site of a table, entries first.

    Keys: fqn, call, role, candidate (null on a miss), tokens (``min-max``), dtype, recipe,
    scale_policy, p_exceed, speedup, reason (null for an entry) and detail.
    """
    entries = [
        {
            "fqn": entry.fqn,
            "call": entry.call,
            "role": entry.role,
            "candidate": entry.candidate,
            "tokens": f"{entry.tokens_min}-{entry.tokens_max}",
            "dtype": entry.dtype,
            "recipe": entry.recipe,
            "scale_policy": entry.scale_policy,
            "p_exceed": entry.evidence.p_exceed,
            "speedup": entry.evidence.speedup,
            "reason": None,
            "detail": entry.evidence.statement,
        }
        for entry in table.entries
    ]
    empty = dict.fromkeys(entries[0] if entries else _COLUMNS)
    misses = [{**empty, **msgspec.structs.asdict(miss)} for miss in table.misses]
    return entries + [{**miss, "reason": miss["reason"].value} for miss in misses]


_COLUMNS = (
    "fqn",
    "call",
    "role",
    "candidate",
    "tokens",
    "dtype",
    "recipe",
    "scale_policy",
    "p_exceed",
    "speedup",
    "reason",
    "detail",
)
