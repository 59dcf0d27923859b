"""``loka.toml``: the tolerance and the sites of interest of a project."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from loka_toolkit.errors import ArtifactMissingError, ConfigurationError
from loka_toolkit.numerics.tolerance import Tolerance

FILE_NAME = "loka.toml"


class SiteFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Globs over site names and module paths.

    Attributes:
        include: Consider only what matches one of these; empty means everything.
        exclude: Leave out what matches one of these.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``loka.toml`` may say.

    Attributes:
        tolerance: Section ``[tolerance]``.
        sites: Section ``[sites]``.
    """

    tolerance: Tolerance = Tolerance()
    sites: SiteFilter = SiteFilter()


def load_settings(path: Path | None) -> Settings:
    """Read a settings file.

    Args:
        path: The file; None reads ``loka.toml`` of the working directory if there is one.

    Raises:
        ArtifactMissingError: If a file was named and is not there.
        ConfigurationError: If it is not TOML, names an unknown field or a value out of limits.
    """
    if path is None:
        path = Path(FILE_NAME)
        if not path.is_file():
            return Settings()
    elif not path.is_file():
        raise ArtifactMissingError(f"no settings file at {path}")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from None
    try:
        settings = msgspec.convert(content, type=Settings)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    settings.tolerance.validated()
    return settings
