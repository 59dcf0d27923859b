"""The dispatch table: what the training job consumes. One JSON file with a published schema."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import msgspec

from loka_toolkit.artifacts import storage
from loka_toolkit.environment import Environment
from loka_toolkit.numerics.tolerance import Tolerance

KIND = "loka-dispatch-table"
SCHEMA_VERSION = 2
"""2: entries name the parameter they multiply, misses say which product they are."""
KERNEL_ABI = 1
"""Raised when a candidate of the same name changes what it computes or how it is called."""
ANY_CALL = "*"


class Objective(enum.StrEnum):
    """What a table is built for.

    ``speed``: fastest measured candidate; ``roofline``: fastest predicted; ``coverage``: every safe
    site in FP8, whether or not that is faster.
    """

    SPEED = "speed"
    ROOFLINE = "roofline"
    COVERAGE = "coverage"


class MissReason(enum.StrEnum):
    """Why a site runs in its original precision."""

    ENV = "env"
    SHAPE = "shape"
    LAYOUT = "layout"
    KERNEL_ABSENT = "kernel-absent"
    UNSAFE = "unsafe"
    INSUFFICIENT = "insufficient-evidence"
    NOT_REPLACEABLE = "not-replaceable"
    NOT_FASTER = "not-faster"
    CONFLICT = "conflicting-calls"
    EXCLUDED = "excluded"


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an entry rests on.

    Attributes:
        verdict: The cell's verdict.
        p_exceed: The cell's exceedance rate.
        recipe_judged: The recipe whose verdict it is.
        numerics: ``measured`` if the candidate passed replay on this chip, else ``none``.
        speed: ``measured``, ``predicted`` or ``none``.
        speedup: Time of the default over the candidate's, casts included, or null.
        replay_row: Digest of the replay row, or null.
        statement: One sentence, for example ``not measured as faster``.
    """

    verdict: str
    p_exceed: float | None
    recipe_judged: str
    numerics: str
    speed: str
    speedup: float | None
    replay_row: str | None
    statement: str


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One site that runs a candidate.

    Attributes:
        fqn: Module path without wrapper prefixes.
        call: Index of the product in the module, or ``*`` for all of them.
        role: fwd, dgrad, wgrad, grad_a or grad_b.
        token_axis: ``m`` or ``k``: where the token count stands; ``batch`` for a product of two
            activations, whose M, N and K are all fixed.
        tokens_min: Least token count for which the entry holds.
        tokens_max: Largest.
        m: Rows of the output, or null where they are the tokens.
        n: Columns of the output.
        k: Contraction length, or null where it is the token count.
        batch: Number of products.
        dtype: Dtype of operands and output.
        layout: Layouts of the operands, for example ``row,row``.
        candidate: Candidate name.
        library: Its library.
        library_version: The version it was judged with.
        recipe: Its recipe.
        scale_policy: ``dynamic`` or ``static``.
        scale_a: Static decode scale of A, or null.
        scale_b: Static decode scale of B, or null.
        fallback: Recipe used on a miss: ``default`` is the model's own precision.
        evidence: What it rests on.
        weight: FQN of the parameter multiplied; null for a product of two activations, and in
            tables of version 1.
    """

    fqn: str
    call: int | str
    role: str
    token_axis: str | None
    tokens_min: int
    tokens_max: int
    m: int | None
    n: int
    k: int | None
    batch: int
    dtype: str
    layout: str
    candidate: str
    library: str
    library_version: str | None
    recipe: str
    scale_policy: str
    scale_a: float | None
    scale_b: float | None
    fallback: str
    evidence: Evidence
    weight: str | None = None


class Miss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A recorded site that the table leaves in its original precision.

    Attributes:
        fqn: Module path.
        call: Index of the product in the module.
        role: Its role.
        reason: Why.
        detail: One sentence.
        weight: FQN of the parameter multiplied; null without one, and in tables of version 1.
        batch: Number of products; null in tables of version 1, as are the next three.
        m: Rows of the output (largest seen).
        n: Columns of the output.
        k: Contraction length (largest seen).
    """

    fqn: str
    call: int
    role: str
    reason: MissReason
    detail: str
    weight: str | None = None
    batch: int | None = None
    m: int | None = None
    n: int | None = None
    k: int | None = None


class OperandPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one operand of a layer gets into FP8.

    Attributes:
        cast_by: ``kernel`` (stand-alone), ``producer`` (fused), ``gemm`` (inside) or ``none``.
        scaling: tensorwise, rowwise or static; several, joined by a comma, where the roles that
            read the operand differ; null without a cast.
        formats: Formats written.
        layouts: Layouts written: ``row``, ``column``.
        kept_for_backward: What backward reads: ``original`` or ``fp8``.
    """

    cast_by: str
    scaling: str | None
    formats: tuple[str, ...]
    layouts: tuple[str, ...]
    kept_for_backward: str


class LayerPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cast plan of a layer.

    Attributes:
        fqn: Module path.
        call: Index of the product in the module, or ``*``.
        operands: Plan per operand: x, w, g or a, b, g.
        producer_chain: FQNs of the fused producers; null where nothing is fused.
    """

    fqn: str
    call: int | str
    operands: dict[str, OperandPlan]
    producer_chain: tuple[str, ...] | None = None


class Validator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fact that must hold where the table is used.

    Attributes:
        name: ``chip``, ``kernel_abi``, ``driver``, or a library.
        expected: The value when the table was built; null if there was none.
        hard: Refuse on a difference; otherwise use with a warning.
    """

    name: str
    expected: str | None
    hard: bool


class DispatchTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dispatch table.

    Attributes:
        kind: Always ``loka-dispatch-table``.
        schema_version: Version of this layout.
        created: UTC, ISO 8601.
        chip: Chip it is for.
        objective: What it was built for.
        environment: Where it was built.
        config: Arguments of the build.
        tolerance: The tolerance behind the verdicts.
        safety_digest: SHA-256 of the safety map.
        replay_digest: SHA-256 of the replay results, or null.
        validators: Facts that must hold where it is used.
        entries: Sites that run a candidate.
        layers: Cast plans.
        misses: Recorded sites that do not, each with its reason.
    """

    kind: str
    schema_version: int
    created: str
    chip: str
    objective: Objective
    environment: Environment
    config: dict[str, Any]
    tolerance: Tolerance
    safety_digest: str
    replay_digest: str | None
    validators: tuple[Validator, ...]
    entries: tuple[Entry, ...]
    layers: tuple[LayerPlan, ...]
    misses: tuple[Miss, ...]

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the table as JSON, atomically.

        Raises:
            ArtifactExistsError: If there is a file and ``force`` is false.
        """
        path = Path(path)
        storage.ensure_writable(path, force=force)
        storage.write_json(path, self)
        return path

    @classmethod
    def load(cls, path: str | Path) -> DispatchTable:
        """Read a table.

        Raises:
            ArtifactError: If it is missing, damaged, foreign or newer.
        """
        return storage.read_json(Path(path), cls, kind=KIND, newest=SCHEMA_VERSION)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a dispatch table."""
    return msgspec.json.schema(DispatchTable)
