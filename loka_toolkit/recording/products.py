"""What an intercepted product is: operands in canonical orientation, role, layout.

A product with a parameter is written x[T,I] w[O,I]^T whichever side the parameter stood on and
however it was stored; a product of activations keeps the orientation in which it was computed.
"""

from __future__ import annotations

import dataclasses

import torch

from loka_toolkit.artifacts.sites import GEMM_OPERANDS, Operand, Role

aten = torch.ops.aten

_FIRST_FACTOR: dict[torch._ops.OpOverload, int] = {
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
}
"""Products that become sites, and the position of their left factor."""


@dataclasses.dataclass(frozen=True)
class Product:
    """One intercepted product out = alpha A B (+ addend).

    Attributes:
        op: Name of the aten operator.
        a: [.., M, K].
        b: [.., K, N].
        out: [.., M, N].
        alpha: Factor of the product in the output.
        has_addend: Whether something was added to the product.
    """

    op: str
    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    alpha: float
    has_addend: bool

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.out.numel() * self.a.shape[-1]


def product_of(
    func: torch._ops.OpOverload,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    out: object,
) -> Product | None:
    """Return the product that an aten call computed, or None if it is not one of ours."""
    first = _FIRST_FACTOR.get(func)
    if first is None:
        return None
    a, b = args[first], args[first + 1]
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return None
    if not isinstance(out, torch.Tensor):
        return None
    alpha = kwargs.get("alpha", 1)
    return Product(
        op=str(func),
        a=a,
        b=b,
        out=out,
        alpha=float(alpha) if isinstance(alpha, int | float) else 1.0,
        has_addend=first == 1,
    )


@dataclasses.dataclass(frozen=True)
class Factors:
    """A product in canonical orientation, ready to be judged.

    Attributes:
        role: What it does.
        operands: The two logical operands, left then right.
        a: [.., M, K].
        b: [.., K, N].
        left_transposed: Whether the left operand is recorded as A transposed.
        right_transposed: Whether the right operand is recorded as B transposed.
    """

    role: Role
    operands: tuple[Operand, Operand]
    a: torch.Tensor
    b: torch.Tensor
    left_transposed: bool = False
    right_transposed: bool = False

    @property
    def left(self) -> torch.Tensor:
        """The left operand as it is recorded: the last dimension holds its features."""
        return self.a.mT if self.left_transposed else self.a

    @property
    def right(self) -> torch.Tensor:
        """The right operand likewise."""
        return self.b.mT if self.right_transposed else self.b

    @property
    def batch(self) -> int:
        """Number of products."""
        return int(self.a.shape[:-2].numel())

    @property
    def dims(self) -> tuple[int, int, int]:
        """M, N, K."""
        return int(self.a.shape[-2]), int(self.b.shape[-1]), int(self.a.shape[-1])


def forward_factors(product: Product, parameter_side: str | None) -> Factors:
    """Return the forward product of a layer in canonical orientation.

    Args:
        product: As intercepted.
        parameter_side: ``"a"`` or ``"b"`` where a factor is a parameter, else None.
    """
    a, b = product.a.detach(), product.b.detach()
    if parameter_side == "a":
        a, b = b.mT, a.mT
    has_parameter = parameter_side is not None
    operands = GEMM_OPERANDS[Role.FWD, has_parameter]
    return Factors(Role.FWD, operands, a, b, right_transposed=has_parameter)


@dataclasses.dataclass(frozen=True)
class ForwardOperands:
    """What backward products are matched against.

    Attributes:
        storage_a: Identity of the left factor's storage, as aten saw it.
        storage_b: Identity of the right factor's storage.
        m: Rows of the output, as aten saw it.
        n: Columns of the output.
        k: Contraction length.
        parameter_side: ``"a"``, ``"b"`` or None.
        is_batched: Whether it was a bmm or baddbmm.
    """

    storage_a: int
    storage_b: int
    m: int
    n: int
    k: int
    parameter_side: str | None
    is_batched: bool


@dataclasses.dataclass(frozen=True)
class GradientMatch:
    """Which gradient a backward product computes.

    Attributes:
        of: ``"a"`` or ``"b"``: the forward factor whose gradient it is.
        transposed: Whether the transposed gradient was computed.
    """

    of: str
    transposed: bool


def match_gradient(
    forward: ForwardOperands,
    left: torch.Size,
    right: torch.Size,
    left_storage: int,
    right_storage: int,
    *,
    already_seen: frozenset[str] | set[str],
) -> GradientMatch | None:
    """Decide which gradient of a forward product a backward product computes.

    The factor that is not the output's gradient is the other forward operand, so its storage
    decides; where storages do not (both factors share one, or saved tensors were unpacked into
    new ones), shapes do, and where these are square, the order in which autograd computes them.

    Args:
        forward: The forward product.
        left: Shape of the backward product's left factor.
        right: Shape of its right factor.
        left_storage: Identity of the left factor's storage.
        right_storage: Identity of the right factor's storage.
        already_seen: Gradients of this forward product already matched.

    Returns:
        None if the shapes fit neither gradient.
    """
    possible = gradients_of_shape(forward, left, right)
    if not possible:
        return None

    def agrees(match: GradientMatch) -> bool:
        other = forward.storage_b if match.of == "a" else forward.storage_a
        stands = right_storage if _other_is_right(match) else left_storage
        return other == stands

    by_storage = [match for match in possible if agrees(match)]
    candidates = by_storage or possible
    if len(candidates) > 1:
        fresh = [match for match in candidates if match.of not in already_seen]
        candidates = fresh or candidates
    if len(candidates) > 1:
        # bmm never transposes; mm and addmm compute the gradient of the left factor first.
        plain = [match for match in candidates if not match.transposed]
        candidates = plain if forward.is_batched and plain else candidates
    return min(candidates, key=lambda match: (match.of, match.transposed))


def _other_is_right(match: GradientMatch) -> bool:
    return (match.of == "a") != match.transposed


def gradients_of_shape(
    forward: ForwardOperands, left: torch.Size, right: torch.Size
) -> list[GradientMatch]:
    """Return the gradients of a forward product that factors of these shapes may compute."""
    m, n, k = forward.m, forward.n, forward.k
    expected = {
        GradientMatch("a", False): ((m, n), (n, k)),
        GradientMatch("a", True): ((k, n), (n, m)),
        GradientMatch("b", False): ((k, m), (m, n)),
        GradientMatch("b", True): ((n, m), (m, k)),
    }
    found = (tuple(left[-2:]), tuple(right[-2:]))
    fitting = [match for match, shapes in expected.items() if shapes == found]
    if forward.is_batched:
        return [match for match in fitting if not match.transposed]
    return fitting


def gradient_factors(
    product: Product, forward: ForwardOperands, match: GradientMatch
) -> tuple[Factors, torch.Tensor]:
    """Return a backward product in canonical orientation, and the gradient of the layer's output.

    The gradient is [.., M, N] in the orientation in which aten multiplied in forward.
    """
    left, right = product.a.detach(), product.b.detach()
    if match.transposed:
        left, right = right.mT, left.mT
    # Now grad_a = g[M,N] b^T[N,K] and grad_b = a^T[K,M] g[M,N], as aten's forward was oriented.
    of_a = match.of == "a"
    gradient = left if of_a else right
    if forward.parameter_side is None:
        role = Role.GRAD_A if of_a else Role.GRAD_B
        factors = Factors(
            role,
            GEMM_OPERANDS[role, False],
            left,
            right,
            left_transposed=not of_a,
            right_transposed=of_a,
        )
        return factors, gradient
    other = right if of_a else left.mT  # b^T [N,K] or a [M,K]: x[T,I] or w[O,I] in either case
    tokens = gradient if forward.parameter_side == "b" else gradient.mT
    if match.of == forward.parameter_side:
        factors = Factors(
            Role.WGRAD, GEMM_OPERANDS[Role.WGRAD, True], tokens.mT, other, left_transposed=True
        )
    else:
        factors = Factors(Role.DGRAD, GEMM_OPERANDS[Role.DGRAD, True], tokens, other)
    return factors, gradient


def layout_of(x: torch.Tensor) -> str:
    """Return ``row``, ``column`` or ``strided`` for the last two dimensions."""
    rows, columns = x.shape[-2], x.shape[-1]
    if x.stride(-1) == 1 and x.stride(-2) >= columns:
        return "row"
    if x.stride(-2) == 1 and x.stride(-1) >= rows:
        return "column"
    return "strided"


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module, for example ``float32``."""
    return str(dtype).removeprefix("torch.")
