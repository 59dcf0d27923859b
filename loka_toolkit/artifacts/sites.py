"""The vocabulary that every artifact shares: roles, operands, site keys, layouts."""

from __future__ import annotations

import enum
import fnmatch
import re
from collections.abc import Iterable, Sequence

import msgspec

from loka_toolkit.errors import ConfigurationError, NoMatchError

WRAPPER_PREFIXES = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
ROOT_FQN = "(root)"

_SITE_PATTERN = re.compile(r"^(?P<fqn>.+)#(?P<call>\d+):(?P<role>[a-z_]+)\Z", re.DOTALL)


class Role(enum.StrEnum):
    """What a GEMM does in the step.

    ``fwd``, ``dgrad`` and ``wgrad`` belong to a product with a parameter; ``fwd``, ``grad_a`` and
    ``grad_b`` to a product of two activations. ``bwd`` is the whole backward of a fused composite
    (attention, RNN), whose ``fwd`` is one operator too. ``norm`` sites are observed and never
    replaced.
    """

    FWD = "fwd"
    DGRAD = "dgrad"
    WGRAD = "wgrad"
    GRAD_A = "grad_a"
    GRAD_B = "grad_b"
    BWD = "bwd"
    NORM = "norm"

    @property
    def is_gradient(self) -> bool:
        """Whether the product changes the update and not the loss."""
        return self not in (Role.FWD, Role.NORM)


class Operand(enum.StrEnum):
    """A tensor that a layer multiplies or normalizes.

    ``x`` input, ``w`` parameter, ``g`` gradient of the layer's output; ``a`` and ``b`` the two
    factors of a product of activations; ``input`` and ``output`` of a norm.
    """

    X = "x"
    W = "w"
    G = "g"
    A = "a"
    B = "b"
    INPUT = "input"
    OUTPUT = "output"


GEMM_OPERANDS: dict[tuple[Role, bool], tuple[Operand, Operand]] = {
    (Role.FWD, True): (Operand.X, Operand.W),
    (Role.DGRAD, True): (Operand.G, Operand.W),
    (Role.WGRAD, True): (Operand.G, Operand.X),
    (Role.FWD, False): (Operand.A, Operand.B),
    (Role.GRAD_A, False): (Operand.G, Operand.B),
    (Role.GRAD_B, False): (Operand.A, Operand.G),
}
"""Left and right factor of the product of a role; the flag says whether one factor is a parameter.

With tokens T, input width I and output width O, the products are written out[M,N] = A[M,K] B[K,N]:
fwd is x[T,I] w^T[I,O], dgrad is g[T,O] w[O,I], wgrad is g^T[O,T] x[T,I]. For a batched product of
activations out = a[M,K] b[K,N], grad_a is g[M,N] b^T[N,K] and grad_b is a^T[K,M] g[M,N].
"""


class SiteKey(msgspec.Struct, frozen=True, order=True):
    """One GEMM of the model.

    Attributes:
        fqn: Path of the module, wrapper prefixes removed; ``(root)`` for the model itself.
        call: Index of the product among those of this module within one call of the model.
        role: What the product does.
    """

    fqn: str
    call: int
    role: Role

    def __str__(self) -> str:
        """Return the site's name in every artifact, for example ``tower.0#0:fwd``."""
        return f"{self.fqn}#{self.call}:{self.role}"

    @property
    def layer(self) -> str:
        """Name of the layer: the sites of one GEMM call together."""
        return f"{self.fqn}#{self.call}"

    @classmethod
    def parse(cls, name: str) -> SiteKey:
        """Return the key that ``str(key)`` names.

        Raises:
            ConfigurationError: If ``name`` is not of the form ``fqn#call:role``.
        """
        match = _SITE_PATTERN.match(name)
        if match is None or match["role"] not in Role.__members__.values():
            raise ConfigurationError(f"not a site name: {name!r} (expected FQN#CALL:ROLE)")
        return cls(fqn=match["fqn"], call=int(match["call"]), role=Role(match["role"]))


def canonical_fqn(name: str) -> str:
    """Return a module path without the prefixes that DDP, FSDP and torch.compile add."""
    parts = [part for part in name.split(".") if part not in WRAPPER_PREFIXES]
    return ".".join(parts) or ROOT_FQN


def token_axis(role: Role) -> str | None:
    """Return the dimension in which the token count stands: ``"m"``, ``"k"`` or None."""
    if role in (Role.FWD, Role.DGRAD):
        return "m"
    return "k" if role is Role.WGRAD else None


def select_sites(
    names: Iterable[str],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    may_be_empty: bool = False,
) -> tuple[str, ...]:
    """Return the site names kept, in order: any of ``include`` and none of ``exclude``.

    Args:
        names: Site names, ``FQN#CALL:ROLE``.
        include: Globs, each held against the site name and its module path; none means all.
        exclude: The same; what one of them matches is left out, included or not.
        may_be_empty: Whether it is right that nothing is left.

    Raises:
        NoMatchError: If a glob matches nothing, or nothing is left; near misses are listed.
    """
    fqns = {name: name.rpartition("#")[0] for name in names}
    known = {*fqns, *fqns.values()}

    def matched(pattern: str) -> set[str]:
        found = {
            name
            for name, fqn in fqns.items()
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(fqn, pattern)
        }
        if not found:
            raise NoMatchError("site", pattern, known)
        return found

    wanted = set[str]().union(*map(matched, include)) if include else set(fqns)
    wanted -= set[str]().union(*map(matched, exclude))
    if not wanted and not may_be_empty:
        raise NoMatchError("site", f"{list(include)} without {list(exclude)}", known)
    return tuple(name for name in fqns if name in wanted)
