"""A table as plain rows, for printing; no pandas."""

from __future__ import annotations

from typing import Any

from loka_toolkit.artifacts.dispatch_table import DispatchTable


def table_rows(table: DispatchTable) -> list[dict[str, Any]]:
    """Return one row per site of a table, entries first.

    Keys: fqn, call, role, weight (null for a product of two activations), candidate (null on a
    miss), tokens (``min-max``), dtype, recipe, scale_policy, p_exceed, speedup, reason (null for
    an entry) and detail.
    """
    entries = [
        {
            "fqn": entry.fqn,
            "call": entry.call,
            "role": entry.role,
            "weight": entry.weight,
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
    misses = [
        {
            **empty,
            "fqn": miss.fqn,
            "call": miss.call,
            "role": miss.role,
            "weight": miss.weight,
            "reason": miss.reason.value,
            "detail": miss.detail,
        }
        for miss in table.misses
    ]
    return entries + misses


_COLUMNS = (
    "fqn",
    "call",
    "role",
    "weight",
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
