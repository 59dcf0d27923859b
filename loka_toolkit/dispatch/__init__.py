"""Dispatch: build a table from safety and replay, check it, install it in a training model.

Building reads safety maps and replay results; installing needs the table and torch alone.
"""

from loka_toolkit.dispatch.build import build_table
from loka_toolkit.dispatch.check import TableCheck, check_table
from loka_toolkit.dispatch.entries import SiteStatus
from loka_toolkit.dispatch.install import Counts, Installation, SiteCounts, install, uninstall
from loka_toolkit.dispatch.show import table_rows
from loka_toolkit.dispatch.validate import Check

__all__ = [
    "Check",
    "Counts",
    "Installation",
    "SiteCounts",
    "SiteStatus",
    "TableCheck",
    "build_table",
    "check_table",
    "install",
    "table_rows",
    "uninstall",
]
