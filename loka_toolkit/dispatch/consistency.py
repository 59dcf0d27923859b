"""Consistency: what holds for every table that ``build_table`` writes, whatever the machine.

A table is a JSON file that can be edited by hand. Its entries route the products of a training job,
so one that no build could have written is refused before anything is routed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from loka_toolkit.artifacts.dispatch_table import ANY_CALL, DispatchTable, Entry
from loka_toolkit.artifacts.safety_map import Verdict
from loka_toolkit.artifacts.sites import Role, token_axis
from loka_toolkit.dispatch.plans import ACTIVATION_ROLES
from loka_toolkit.dispatch.signatures import BATCH_AXIS
from loka_toolkit.dispatch.validate import Check
from loka_toolkit.numerics.recipes import Scaling, all_recipes
from loka_toolkit.numerics.scaling import SMALLEST_SCALE

FALLBACK = "default"
"""What runs on a miss in every table of this version: the model's own precision."""

STATIC, DYNAMIC = "static", "dynamic"

_REQUIRED = ("chip", "kernel_abi")
_RECIPES = all_recipes()
_LARGEST_SCALE = float(torch.finfo(torch.float32).max)


def check_consistency(table: DispatchTable) -> tuple[Check, ...]:
    """Return a failed hard check for everything in a table that no build could have written.

    An unknown role is left to :func:`~loka_toolkit.dispatch.resolve.resolve`, which names near
    misses, and so is the scale policy of an unknown recipe: its candidate is unknown as well.

    Args:
        table: The table.
    """
    found = list(_check_required_validators(table))
    for entry in table.entries:
        found += _check_evidence(entry)
        found += _check_shape(entry)
        found += _check_scales(entry)
    found += _check_overlaps(table)
    return tuple(found)


def _check_required_validators(table: DispatchTable) -> Iterator[Check]:
    for name in _REQUIRED:
        mine = [validator for validator in table.validators if validator.name == name]
        if not mine:
            yield Check(f"validator {name}", "a hard validator", "none in the table", True)
        for validator in mine:
            if not validator.hard:
                yield Check(f"validator {name}", "hard", "soft", True)
            if name == "chip" and validator.expected != table.chip:
                actual = _text(validator.expected)
                yield Check("validator chip", f"{table.chip!r}, the table's chip", actual, True)


def _check_evidence(entry: Entry) -> Iterator[Check]:
    if entry.evidence.verdict != Verdict.SAFE.value:
        yield _failed(entry, "verdict", repr(Verdict.SAFE.value), entry.evidence.verdict)
    if entry.fallback != FALLBACK:
        yield _failed(entry, "fallback", repr(FALLBACK), entry.fallback)


def _check_shape(entry: Entry) -> Iterator[Check]:
    call = entry.call
    if call != ANY_CALL and (isinstance(call, str) or call < 0):
        yield _failed(entry, "call", f"{ANY_CALL!r} or at least 0", call)
    if entry.tokens_min < 1:
        yield _failed(entry, "tokens_min", "at least 1", entry.tokens_min)
    if entry.tokens_max < entry.tokens_min:
        expected = f"at least tokens_min = {entry.tokens_min}"
        yield _failed(entry, "tokens_max", expected, entry.tokens_max)
    for name, size in (("n", entry.n), ("batch", entry.batch)):
        if size < 1:
            yield _failed(entry, name, "at least 1", size)
    if entry.role not in Role.__members__.values():
        return
    axis = token_axis(Role(entry.role))
    if axis is None or (entry.token_axis == BATCH_AXIS and entry.role in ACTIVATION_ROLES):
        axis = BATCH_AXIS
    if entry.token_axis != axis:
        yield _failed(entry, "token_axis", _text(axis), entry.token_axis)
    if axis == BATCH_AXIS and entry.weight is not None:
        yield _failed(entry, "weight", "null, for it multiplies two activations", entry.weight)
    for name, width in (("m", entry.m), ("k", entry.k)):
        if name == axis and width is not None:
            yield _failed(entry, name, "null, the tokens", width)
        if name != axis and (width is None or width < 1):
            yield _failed(entry, name, "at least 1", width)


def _check_scales(entry: Entry) -> Iterator[Check]:
    recipe = _RECIPES.get(entry.recipe)
    if recipe is not None:
        policy = STATIC if recipe.has_static_scale else DYNAMIC
        if entry.scale_policy != policy:
            expected = f"{policy!r} for {entry.recipe}"
            yield _failed(entry, "scale_policy", expected, entry.scale_policy)
    elif entry.scale_policy not in (STATIC, DYNAMIC):
        yield _failed(entry, "scale_policy", f"{STATIC!r} or {DYNAMIC!r}", entry.scale_policy)
    static_a = static_b = entry.scale_policy == STATIC
    if recipe is not None:
        static_a, static_b = (scaling is Scaling.STATIC for scaling in recipe.scalings)
    policies = (static_a, static_b)
    scales = zip(("scale_a", "scale_b"), (entry.scale_a, entry.scale_b), policies, strict=True)
    for name, scale, static in scales:
        if not static and scale is not None:
            yield _failed(entry, name, "null, for the scales are dynamic", scale)
        if static and (scale is None or not SMALLEST_SCALE <= scale <= _LARGEST_SCALE):
            expected = f"a float32 from {SMALLEST_SCALE:.4g} to {_LARGEST_SCALE:.4g}"
            yield _failed(entry, name, expected, scale)


def _check_overlaps(table: DispatchTable) -> Iterator[Check]:
    by_site: dict[tuple[str, str], list[tuple[int, Entry]]] = {}
    for number, entry in enumerate(table.entries):
        by_site.setdefault((entry.fqn, entry.role), []).append((number, entry))
    for numbered in by_site.values():
        for (one, first), (other, second) in itertools.combinations(numbered, 2):
            same_call = first.call == second.call or ANY_CALL in (first.call, second.call)
            least = max(first.tokens_min, second.tokens_min)
            most = min(first.tokens_max, second.tokens_max)
            if same_call and least <= most:
                actual = f"entries {one} and {other} for {least} to {most} tokens"
                expected = "one entry per call and token count"
                yield Check(f"{_site(first)} entries", expected, actual, True)


def _failed(entry: Entry, field: str, expected: str, actual: object) -> Check:
    return Check(f"{_site(entry)} {field}", expected, _text(actual), True)


def _site(entry: Entry) -> str:
    return f"{entry.fqn}#{entry.call}:{entry.role}"


def _text(value: object) -> str:
    return "null" if value is None else repr(value)
