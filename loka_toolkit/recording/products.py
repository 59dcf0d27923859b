"""What an intercepted product is: operands in canonical orientation, role, layout.

A product with a parameter is written x[T,I] w[O,I]^T whichever side the parameter stood on and
however it was stored; a product of activations keeps the orientation in which it was computed.
"""

from __future__ import annotations

import dataclasses
import enum

import torch

from loka_toolkit.artifacts.sites import GEMM_OPERANDS, Operand, Role

aten = torch.ops.aten


class _Form(enum.Enum):
    """Which of the two factors are vectors."""

    MATRICES = enum.auto()
    RIGHT_VECTOR = enum.auto()
    VECTORS = enum.auto()


_PRODUCTS: dict[torch._ops.OpOverloadPacket, tuple[int, _Form]] = {
    aten.mm: (0, _Form.MATRICES),
    aten.bmm: (0, _Form.MATRICES),
    aten.addmm: (1, _Form.MATRICES),
    aten.addmm_: (1, _Form.MATRICES),
    aten.baddbmm: (1, _Form.MATRICES),
    aten.baddbmm_: (1, _Form.MATRICES),
    aten._addmm_activation: (1, _Form.MATRICES),
    aten._sparse_addmm: (1, _Form.MATRICES),
    aten._int_mm: (0, _Form.MATRICES),
    aten._scaled_mm: (0, _Form.MATRICES),
    aten.mv: (0, _Form.RIGHT_VECTOR),
    aten.addmv: (1, _Form.RIGHT_VECTOR),
    aten.addmv_: (1, _Form.RIGHT_VECTOR),
    aten.dot: (0, _Form.VECTORS),
    aten.vdot: (0, _Form.VECTORS),
}
"""Products that become sites, the position of their left factor, and their form. Outer products
(ger, addr) contract over nothing: they are element-wise work."""

INSTALLED_TABLE = "run by an installed dispatch table: record inside installation.paused()"
"""Why a product that the toolkit's own operators compute is not judged: its operands are not those
of the original precision, and what an operator does inside is hidden from the recorder."""

_INSTALLED_PREFIXES = ("loka::gemm", "loka::missed_")
_INSTALLED_LINEAR = "loka::missed_linear"


@dataclasses.dataclass(frozen=True)
class SiteShape:
    """What the table ``sites`` says of one product.

    Attributes:
        op: Name of the operator.
        batch: Number of products.
        m: Rows of the output.
        n: Columns of the output.
        k: Contraction length.
        dtype_a: Dtype of the left factor.
        dtype_b: Dtype of the right factor.
        dtype_out: Dtype of the output.
        layout_a: ``row``, ``column`` or ``strided``.
        layout_b: Likewise.
        flops: FLOPs of one execution.
        bar: Why no kernel can stand in for it; None if one can.
    """

    op: str
    batch: int
    m: int
    n: int
    k: int
    dtype_a: str
    dtype_b: str
    dtype_out: str
    layout_a: str
    layout_b: str
    flops: float
    bar: str | None = None

    @property
    def dims(self) -> tuple[int, int, int, int]:
        """Batch, M, N, K."""
        return self.batch, self.m, self.n, self.k


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
        is_installed: Whether an installed dispatch table computed it.
    """

    op: str
    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    alpha: float
    has_addend: bool
    is_installed: bool = False

    @property
    def flops(self) -> float:
        """Floating-point operations; of a sparse factor only the entries count."""
        sparse = [x for x in (self.a, self.b) if x.layout is not torch.strided]
        if len(sparse) == 1:
            other = self.out.shape[-1] if sparse[0] is self.a else self.out.shape[-2]
            return 2.0 * sparse[0]._nnz() * other
        return 2.0 * self.out.numel() * self.a.shape[-1]

    @property
    def unjudged(self) -> str | None:
        """Why its errors cannot be told; None if they can."""
        if self.is_installed:
            return INSTALLED_TABLE
        if self.a.layout is not torch.strided or self.b.layout is not torch.strided:
            return "a factor is sparse"
        for x in (self.a, self.b):
            if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
                return f"a factor of dtype {dtype_name(x.dtype)} has no precision to lose"
        return None


def is_product(func: torch._ops.OpOverload) -> bool:
    """Whether an operator computes one product."""
    return func.overloadpacket in _PRODUCTS or func._schema.name.startswith(_INSTALLED_PREFIXES)


def product_of(
    func: torch._ops.OpOverload,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    out: object,
) -> Product | None:
    """Return the product that a call computed, or None if it is not one of ours."""
    known = _PRODUCTS.get(func.overloadpacket)
    name = func._schema.name
    is_installed = known is None and name.startswith(_INSTALLED_PREFIXES)
    if is_installed:
        known = 0, _Form.MATRICES
    if known is None or not isinstance(out, torch.Tensor):
        return None
    first, form = known
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    a, b = list(named.values())[first : first + 2]
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return None
    if name == _INSTALLED_LINEAR:
        a, b, out = a.reshape(-1, a.shape[-1]), b.mT, out.reshape(-1, out.shape[-1])
    if form is not _Form.MATRICES:
        b = b.unsqueeze(-1)
        a = a.unsqueeze(0) if form is _Form.VECTORS else a
        out = out.reshape(a.shape[0], 1)
    alpha = kwargs.get("alpha", 1)
    return Product(
        op=str(func),
        a=a,
        b=b,
        out=out,
        alpha=float(alpha) if isinstance(alpha, int | float) else 1.0,
        has_addend=first == 1,
        is_installed=is_installed,
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


def shape_of(product: Product, factors: Factors) -> SiteShape:
    """Return what the table ``sites`` says of a product in canonical orientation."""
    m, n, k = factors.dims
    return SiteShape(
        op=product.op,
        batch=factors.batch,
        m=m,
        n=n,
        k=k,
        dtype_a=dtype_name(factors.a.dtype),
        dtype_b=dtype_name(factors.b.dtype),
        dtype_out=dtype_name(product.out.dtype),
        layout_a=layout_of(factors.a),
        layout_b=layout_of(factors.b),
        flops=product.flops,
        bar=None if product.is_installed else product.unjudged,
    )


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
    by_storage = [m for m in possible if agrees(forward, m, left_storage, right_storage)]
    candidates = by_storage or possible
    if len(candidates) > 1:
        fresh = [match for match in candidates if match.of not in already_seen]
        candidates = fresh or candidates
    if len(candidates) > 1:
        # bmm never transposes; mm and addmm compute the gradient of the left factor first.
        plain = [match for match in candidates if not match.transposed]
        candidates = plain if forward.is_batched and plain else candidates
    return min(candidates, key=lambda match: (match.of, match.transposed))


def agrees(
    forward: ForwardOperands, match: GradientMatch, left_storage: int, right_storage: int
) -> bool:
    """Whether the factor that is not the output's gradient is the other forward operand."""
    other = forward.storage_b if match.of == "a" else forward.storage_a
    stands = right_storage if _other_is_right(match) else left_storage
    return other == stands


def role_of(forward: ForwardOperands, match: GradientMatch) -> Role:
    """Return the role of a gradient of a forward product."""
    if forward.parameter_side is None:
        return Role.GRAD_A if match.of == "a" else Role.GRAD_B
    return Role.WGRAD if match.of == forward.parameter_side else Role.DGRAD


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
    """Return ``row``, ``column`` or ``strided`` for the last two dimensions, or ``sparse``."""
    if x.layout is not torch.strided:
        return "sparse"
    rows, columns = x.shape[-2], x.shape[-1]
    if x.stride(-1) == 1 and x.stride(-2) >= columns:
        return "row"
    if x.stride(-2) == 1 and x.stride(-1) >= rows:
        return "column"
    return "strided"


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module, for example ``float32``."""
    return str(dtype).removeprefix("torch.")
