"""What makes one sample of an operand, and which samples are of one kind."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from loka_toolkit.artifacts.sites import Operand
from loka_toolkit.recording.moments import BatchMoments
from loka_toolkit.recording.sampling import RowLayout

MOST_SLOTS = 16
"""Kinds of products of a batch that are told apart, such as attention heads."""
MOST_PRODUCT_FEATURES = 4096
"""Elements of a matrix of a batched product up to which the whole matrix is one sample."""
LEAST_PRODUCTS = 32
"""Products of one kind, per step, from which whole matrices are samples."""

JOINT = "ab"
"""Name of the two factors of a product of activations, taken as one sample."""


class Place(NamedTuple):
    """Where moments belong.

    Attributes:
        operand: Name of the operand, ``ab`` or ``gx``.
        sample_rows: Rows of the operand that make one sample.
        slot: Which of every ``slots`` products of a batch.
        slots: Kinds of products.
    """

    operand: str
    sample_rows: int = 1
    slot: int = 0
    slots: int = 1


@dataclasses.dataclass(frozen=True)
class Slots:
    """Which products of a batch are of one kind.

    Attributes:
        count: Kinds; 1 if nothing is known.
        alternate: Whether product i is of kind ``i % count``; else kinds are consecutive blocks.
    """

    count: int = 1
    alternate: bool = True

    @classmethod
    def of(
        cls, products: int, rows: int, layout: RowLayout | None, leading: tuple[int, ...] = ()
    ) -> Slots:
        """Return the kinds of the products of a batch.

        A kind is a place within an example, such as a head; a few products are a kind each.

        Args:
            products: Number of products.
            rows: Output rows of each.
            layout: How the rows of all products map to examples, if known.
            leading: Sizes that the rows of all products were flattened from; where the examples
                are not known, the smaller of the two that make the products is taken for a place.
        """
        sizes = _leading_sizes(products, leading)
        found = cls()
        if layout is not None and layout.outer == 1 and layout.inner % rows == 0:
            found = cls(layout.inner // rows)
        elif layout is not None and layout.inner == rows:
            found = cls(layout.outer, alternate=False)
        elif layout is None and len(sizes) == 2:
            found = cls(min(sizes), alternate=sizes[1] <= sizes[0])
        elif products <= MOST_SLOTS:
            found = cls(products)
        known = 1 < found.count <= MOST_SLOTS and products % found.count == 0
        return found if known else cls()

    def split(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the products of each kind of x [products, rows, width]."""
        if self.alternate:
            return [x[slot :: self.count] for slot in range(self.count)]
        return list(x.chunk(self.count))


def _leading_sizes(products: int, leading: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first sizes, other than 1, whose product is the number of products."""
    whole, found = 1, []
    for size in leading:
        if whole == products:
            break
        whole *= size
        found += [size] if size != 1 else []
    return tuple(found) if whole == products else ()


Parts = dict[Place, BatchMoments | torch.Tensor | None]
"""Moments of an operand; a copy of a weight, of which the spectrum is taken when it is written;
None where b is the transpose of a."""


def operand_parts(
    operand: Operand, x: torch.Tensor, full_width: int, slots: Slots, *, has_parameter: bool
) -> Parts:
    """Return the moments of an operand [rows, width] or [products, rows, width], finite.

    Args:
        operand: Its name.
        x: The operand as recorded.
        full_width: Longest samples whose full covariance is kept.
        slots: Kinds of the products.
        has_parameter: Whether its layer multiplies a parameter: rows are samples then.
    """
    name, counted = str(operand), operand is not Operand.G
    if operand is Operand.W:
        if x.ndim == 3 and slots.count == x.shape[0]:
            return {
                Place(name, 1, slot, slots.count): _copy(part[0])
                for slot, part in enumerate(slots.split(x))
            }
        return {Place(name): _copy(x.reshape(-1, x.shape[-1]))}
    if x.ndim < 3:
        return {Place(name): BatchMoments.of(x, full_width, with_marginals=counted)}
    if not has_parameter and _are_samples(x, slots):
        whole: Parts = {
            Place(name, x.shape[1], slot, slots.count): BatchMoments.of(
                part.flatten(1), full_width, with_marginals=counted, sample_rows=x.shape[1]
            )
            for slot, part in enumerate(slots.split(x))
        }
        return whole | {Place(name): BatchMoments.of(x, full_width, with_marginals=counted)}
    return {
        Place(name, 1, slot, slots.count): BatchMoments.of(part, full_width, with_marginals=counted)
        for slot, part in enumerate(slots.split(x))
    }


def joint_parts(a: torch.Tensor, b: torch.Tensor, full_width: int, slots: Slots) -> Parts:
    """Return the moments of both factors of a product of activations, taken together.

    Args:
        a: [products, M, K].
        b: [products, K, N].
        full_width: Longest samples whose full covariance is kept; there are none of longer ones.
        slots: Kinds of the products.
    """
    if is_transpose(a, b):
        return {Place(str(Operand.B)): None}
    features = a[0].numel() + b[0].numel()
    if features > full_width or not (_are_samples(a, slots) and _are_samples(b, slots)):
        return {}
    pairs = zip(slots.split(a), slots.split(b), strict=True)
    return {
        Place(JOINT, 1, slot, slots.count): BatchMoments.of(
            torch.cat([left.flatten(1), right.flatten(1)], dim=1), full_width, with_marginals=True
        )
        for slot, (left, right) in enumerate(pairs)
    }


def is_transpose(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether b is the transpose of a, in the same memory."""
    turned = b.mT
    return (
        a.data_ptr() == turned.data_ptr()
        and a.shape == turned.shape
        and a.stride() == turned.stride()
    )


def _are_samples(x: torch.Tensor, slots: Slots) -> bool:
    enough = x.shape[0] // slots.count >= LEAST_PRODUCTS
    return enough and x[0].numel() <= MOST_PRODUCT_FEATURES


def _copy(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().to("cpu", torch.float32, copy=True)
