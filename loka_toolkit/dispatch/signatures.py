"""Signatures: by what a product is known, when a table is built and when it runs.

A product with a parameter is known by the parameter, its sizes O and I as x[T,I] w[O,I]^T, and how
many products there are; a product of two activations by M, N and K, however many there are. Both
leave out what depends on the batch of examples.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.dispatch.plans import ACTIVATION_ROLES, LINEAR_ROLES

BATCH_AXIS = "batch"
"""Value of an entry's ``token_axis`` where the number of products varies with the examples."""


class Site(Protocol):
    """What a cell, an entry and a miss have in common."""

    @property
    def role(self) -> str: ...  # noqa: D102
    @property
    def weight(self) -> str | None: ...  # noqa: D102
    @property
    def batch(self) -> int | None: ...  # noqa: D102
    @property
    def m(self) -> int | None: ...  # noqa: D102
    @property
    def n(self) -> int | None: ...  # noqa: D102
    @property
    def k(self) -> int | None: ...  # noqa: D102


@dataclasses.dataclass(frozen=True)
class Signature:
    """By what a product is known.

    Attributes:
        weight: FQN of the parameter, or None for a product of two activations.
        sizes: (O, I, number of products) with a parameter, else (M, N, K).
    """

    weight: str | None
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        """Return it in words."""
        if self.weight is None:
            m, n, k = self.sizes
            return f"two activations, {m}x{k} by {k}x{n}"
        outputs, inputs, batch = self.sizes
        several = "" if batch == 1 else f", {batch} of them"
        return f"{self.weight} as {outputs}x{inputs}{several}"


def signature_of(site: Site) -> Signature | None:
    """Return the signature of the layer to which a site belongs.

    Returns:
        None where the role is no product of that kind, or a size is not known.
    """
    role, m, n, k = site.role, site.m, site.n, site.k
    if site.weight is not None:
        if site.batch is None:
            return None
        pair = {Role.FWD: (n, k), Role.DGRAD: (k, n), Role.WGRAD: (m, n)}
        found = pair.get(Role(role)) if role in LINEAR_ROLES else None
        if found is None or found[0] is None or found[1] is None:
            return None
        return Signature(site.weight, (found[0], found[1], site.batch))
    if role not in ACTIVATION_ROLES or m is None or n is None or k is None:
        return None
    return Signature(
        None, {Role.FWD: (m, n, k), Role.GRAD_A: (m, k, n), Role.GRAD_B: (k, n, m)}[Role(role)]
    )
