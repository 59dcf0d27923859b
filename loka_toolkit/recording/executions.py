"""Which forward a backward product, or one computed anew, belongs to.

Every forward is numbered by autograd when it makes its node; the node that runs in backward has
the same number. A forward without a node of its own (inside of a custom autograd function, or of
a reentrant checkpoint) carries the number given out last, which is that of the enclosing function.
Numbers are counted per thread and recomputed forwards may run on a thread of the engine, so shapes
and memory have their say too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from loka_toolkit.artifacts.sites import Role, SiteKey
from loka_toolkit.recording.layers import Layer
from loka_toolkit.recording.products import (
    ForwardOperands,
    GradientMatch,
    agrees,
    match_gradient,
)


@dataclasses.dataclass
class Execution:
    """One execution of a forward.

    Attributes:
        fqn: Module.
        call: Index of the product in the module.
        op: Operator.
        dims: Batch, M, N, K.
        weight: Parameter multiplied, or None.
        operands: What backward products are matched against; None of a composite.
        factors: Identities of the operands' storages.
        layer: The layer that its gradients are judged for; None if they are not.
        repeats: Why it is not the first execution of its site; None if it is.
        unjudged: Why its gradients are not judged although it is the first; None if they are.
        sequence: Its number in autograd, or that of the function around it.
        has_node: Whether the number is its own.
        matched: Gradients already computed, by factor.
        roles: Their roles.
        is_recomputed: Whether it was computed anew in this backward.
    """

    fqn: str
    call: int
    op: str
    dims: tuple[int, int, int, int]
    weight: str | None
    operands: ForwardOperands | None
    factors: tuple[int, ...]
    layer: Layer | None
    repeats: str | None
    unjudged: str | None
    sequence: int
    has_node: bool
    matched: set[str] = dataclasses.field(default_factory=set)
    roles: set[Role] = dataclasses.field(default_factory=set)
    is_recomputed: bool = False

    def site(self, role: Role) -> SiteKey:
        """Return the key of one of its sites."""
        return SiteKey(fqn=self.fqn, call=self.call, role=role)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a recomputed forward must have in common with it."""
        return self.fqn, self.op, self.dims, self.weight


@dataclasses.dataclass(frozen=True)
class Found:
    """The forward of a backward product.

    Attributes:
        execution: The forward.
        match: Which gradient of it was computed.
    """

    execution: Execution
    match: GradientMatch


class Executions:
    """All forwards of a step, in order."""

    def __init__(self) -> None:
        self._all: list[Execution] = []
        self._by_sequence: dict[int, list[Execution]] = {}
        self._left_out: dict[int, str] = {}
        self._position: dict[int, int] = {}

    def add(self, execution: Execution) -> None:
        """Note a forward."""
        self._all.append(execution)
        self._at(execution.sequence).append(execution)

    def leave_out(self, sequence: int, reason: str) -> None:
        """Note that a forward with this number is not recorded."""
        self._left_out.setdefault(sequence, reason)

    def why_left_out(self, sequence: int) -> str | None:
        """Return why the forward with this number is not recorded, if that is known."""
        return self._left_out.get(sequence)

    def at(self, sequence: int) -> list[Execution]:
        """Return the forwards with this number, those with a node of their own first."""
        return sorted(self._by_sequence.get(sequence, ()), key=lambda e: not e.has_node)

    def of_gradient(
        self, sequence: int, left: torch.Size, right: torch.Size, storages: tuple[int, int]
    ) -> Found | None:
        """Return the forward whose gradient a product with these factors is, or None."""
        best: tuple[tuple[bool, bool, bool], Found] | None = None
        for execution in self.at(sequence):
            if execution.operands is None:
                continue
            match = match_gradient(
                execution.operands, left, right, *storages, already_seen=execution.matched
            )
            if match is None:
                continue
            score = (
                execution.has_node,
                agrees(execution.operands, match, *storages),
                match.of not in execution.matched,
            )
            if best is None or score > best[0]:
                best = score, Found(execution, match)
        return best[1] if best is not None else None

    def recomputed(
        self, kind: tuple[Any, ...], factors: tuple[int, ...], node: Any
    ) -> Execution | None:
        """Return the forward that is being computed anew, or None.

        A checkpoint repeats its products in their order. Where its first one might be any of
        several, the input's memory decides, which is that of the first time; else, of a reentrant
        checkpoint, its number, which the products inside of it carry; else the latest forward not
        yet repeated, since backward goes backward.

        Args:
            kind: As :attr:`Execution.kind`.
            factors: Identities of the operands' storages.
            node: The node of autograd that is running.
        """
        sequence = int(node._sequence_nr())
        fitting = [i for i, execution in enumerate(self._all) if execution.kind == kind]
        if not fitting:
            return None
        last = self._position.get(sequence)
        chosen = next((i for i in fitting if last is not None and i > last), None)
        if chosen is None:
            chosen = self._first_repeated(fitting, factors, node, sequence)
        self._position[sequence] = chosen
        self._all[chosen].is_recomputed = True
        return self._all[chosen]

    def _first_repeated(
        self, fitting: list[int], factors: tuple[int, ...], node: Any, sequence: int
    ) -> int:
        fresh = [i for i in fitting if not self._all[i].is_recomputed] or fitting
        if isinstance(node, BackwardCFunction):
            inside = [i for i in fitting if self._all[i].sequence == sequence]
            inside = inside or [i for i in fresh if self._all[i].sequence > sequence]
            if inside:
                return inside[0]
        same = [i for i in fresh if self._all[i].factors == factors]
        if same:
            return same[0]
        earlier = [i for i in fresh if self._all[i].sequence <= sequence]
        return (earlier or fresh)[-1]

    def repeat(self, first: Execution, again: Execution) -> None:
        """Note that a forward ran again; its gradients may come under either number."""
        if not first.has_node:
            first.sequence = again.sequence
        self._at(again.sequence).append(again)

    def same_forward(self, sequence: int, storages: tuple[int, int]) -> Execution | None:
        """Return the forward with this number that multiplied the same memory, or None."""
        return next((e for e in self.at(sequence) if e.factors == storages), None)

    def _at(self, sequence: int) -> list[Execution]:
        return self._by_sequence.setdefault(sequence, [])
