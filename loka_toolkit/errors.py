"""Every exception that loka_toolkit raises on purpose.

LokaError                        exit code 1 on the command line
├── ConfigurationError           a wrong argument or setting (exit code 2)
│   ├── UnknownNameError         a name that does not exist; near misses are listed
│   └── NoMatchError             a pattern that matches nothing; near misses are listed
├── ArtifactError                a file or directory that cannot be used
│   ├── ArtifactMissingError     it is not there
│   ├── ArtifactExistsError      it is there already, and overwriting was not asked for
│   ├── ArtifactUnwritableError  nothing can be written there
│   ├── ArtifactCorruptError     truncated, empty, or not ours
│   └── ArtifactVersionError     written by a newer schema
├── NoEvidenceError              a run in which nothing was recorded
├── TableError                   a dispatch table that cannot be used
│   ├── TableRefusedError        made for other hardware or another kernel ABI
│   └── TableMismatchError       its sites are not those of the model
├── ReplayError                  a replay that cannot start
└── MissingDependencyError       an optional package that a command needs is absent
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class LokaError(Exception):
    """Root of the tree; its message is one line that a user can act on."""

    exit_code: ClassVar[int] = 1


class ConfigurationError(LokaError):
    """A wrong argument or setting: the message names the value, the limit and the next step."""

    exit_code: ClassVar[int] = 2


class UnknownNameError(ConfigurationError):
    """A name that does not exist.

    Args:
        kind: What was named, for example ``"recipe"``.
        name: The name as given.
        known: Every name that would have been accepted.
        why: Why it does not exist, if it looks as if it should.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], why: str | None = None) -> None:
        because = "" if why is None else f" ({why})"
        super().__init__(f"unknown {kind} {name!r}{because}; {near_misses(name, known)}")
        self.name = name


class NoMatchError(ConfigurationError):
    """A pattern that matches nothing.

    Args:
        kind: What was searched, for example ``"site"``.
        pattern: The pattern as given.
        candidates: The names that were searched.
    """

    def __init__(self, kind: str, pattern: str, candidates: Iterable[str]) -> None:
        super().__init__(f"no {kind} matches {pattern!r}; {near_misses(pattern, candidates)}")
        self.pattern = pattern


class ArtifactError(LokaError):
    """A file or directory that cannot be used."""


class ArtifactMissingError(ArtifactError):
    """There is nothing at the path given."""


class ArtifactExistsError(ArtifactError):
    """There is something at the path already and overwriting was not asked for."""


class ArtifactUnwritableError(ArtifactError):
    """Nothing can be written at the path given; the message says why."""


class ArtifactCorruptError(ArtifactError):
    """The file is truncated, empty, or not one of ours."""


class ArtifactVersionError(ArtifactError):
    """The file was written by a newer schema than this version reads."""


class NoEvidenceError(LokaError):
    """A run in which nothing was recorded; the message says why."""


class TableError(LokaError):
    """A dispatch table that cannot be used."""


class TableRefusedError(TableError):
    """A table made for other hardware or another kernel ABI; expected and actual are printed."""


class TableMismatchError(TableError):
    """A table whose sites are not those of the model."""


class ReplayError(LokaError):
    """A replay that cannot start, for example because the trace holds no moments."""


class MissingDependencyError(LokaError):
    """An optional package is absent.

    Args:
        package: The distribution that is missing.
        extra: The extra of loka-toolkit that brings it.
        needed_for: What it is needed for.
    """

    def __init__(self, package: str, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs {package}; install it with: pip install 'loka-toolkit[{extra}]'"
        )


def near_misses(name: str, known: Iterable[str], limit: int = 5) -> str:
    """Return a clause that lists the known names closest to ``name``, best first."""
    names = sorted({str(n) for n in known})
    if not names:
        return "there are none"
    close = difflib.get_close_matches(name, names, n=limit, cutoff=0.4)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    shown = ", ".join(names[:limit])
    return f"known: {shown}" + (f" and {len(names) - limit} more" if len(names) > limit else "")
