"""What this machine is and which candidates run on it."""

from __future__ import annotations

import importlib.util

import msgspec
import torch

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.environment import Environment, current_environment
from loka_toolkit.kernels.catalog import catalog
from loka_toolkit.kernels.contract import Candidate, Chip, Problem
from loka_toolkit.kernels.emulated import parameter_mismatch

EXTRAS: dict[str, tuple[str, ...]] = {
    "analyze": ("pandas", "pymc", "nutpie", "arviz", "matplotlib", "jinja2"),
    "kernels": ("triton",),
}
"""Modules that each optional extra brings."""


class CandidateState(msgspec.Struct, frozen=True):
    """Whether a candidate runs here.

    Attributes:
        name: Its name.
        version: Version of its library, or null if it is absent.
        emulated: Whether its arithmetic is emulated.
        refusal: Why it would not run a large, well-aligned product here; null if it would.
    """

    name: str
    version: str | None
    emulated: bool
    refusal: str | None


class EnvironmentDescription(msgspec.Struct, frozen=True):
    """What this machine is and what it offers.

    Attributes:
        environment: The fingerprint that artifacts carry.
        missing: Modules that are absent, by extra.
        candidates: Every known candidate.
    """

    environment: Environment
    missing: dict[str, tuple[str, ...]]
    candidates: tuple[CandidateState, ...]


def describe_environment() -> EnvironmentDescription:
    """Return what this machine is and what it offers."""
    environment = current_environment()
    missing = {
        extra: tuple(name for name in names if importlib.util.find_spec(name) is None)
        for extra, names in EXTRAS.items()
    }
    capability = environment.capability.split(".") if environment.capability else None
    chip = Chip(environment.chip, (int(capability[0]), int(capability[1])) if capability else None)
    return EnvironmentDescription(
        environment=environment,
        missing={extra: names for extra, names in missing.items() if names},
        candidates=tuple(_state(candidate, chip) for candidate in catalog()),
    )


def _state(candidate: Candidate, chip: Chip) -> CandidateState:
    version = candidate.version()
    refusal = _refusal(candidate, chip) if version else f"{candidate.library} is absent"
    return CandidateState(candidate.name, version, candidate.emulated, refusal)


def _refusal(candidate: Candidate, chip: Chip) -> str | None:
    """Return why a candidate runs neither with a parameter nor with two activations."""
    reasons = []
    for parameter in (True, False):
        problem = Problem(Role.FWD, 1, 4096, 1024, 1024, torch.bfloat16, parameter)
        reason = candidate.supports(problem, chip)
        if reason is None:
            return None
        if reason != parameter_mismatch(problem):
            reasons.append(reason)
    return reasons[0]
