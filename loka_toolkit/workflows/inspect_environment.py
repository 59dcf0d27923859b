"""What this machine is and which candidates run on it."""

from __future__ import annotations

import importlib.util

import msgspec

from loka_toolkit.environment import Environment, current_environment
from loka_toolkit.kernels.catalog import catalog

EXTRAS: dict[str, tuple[str, ...]] = {
    "analyze": ("pandas", "pymc", "nutpie", "arviz", "matplotlib", "jinja2"),
    "kernels": ("triton",),
}
"""Modules that each optional extra brings."""


class EnvironmentDescription(msgspec.Struct, frozen=True):
    """What this machine is and what it offers.

    Attributes:
        environment: The fingerprint that artifacts carry.
        missing: Modules that are absent, by extra.
        candidates: Version of the library of every candidate; null where it is absent.
    """

    environment: Environment
    missing: dict[str, tuple[str, ...]]
    candidates: dict[str, str | None]


def describe_environment() -> EnvironmentDescription:
    """Return what this machine is and what it offers."""
    missing = {
        extra: tuple(name for name in names if importlib.util.find_spec(name) is None)
        for extra, names in EXTRAS.items()
    }
    return EnvironmentDescription(
        environment=current_environment(),
        missing={extra: names for extra, names in missing.items() if names},
        candidates={candidate.name: candidate.version() for candidate in catalog()},
    )
