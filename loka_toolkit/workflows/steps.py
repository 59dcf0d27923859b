"""One step of the road at a time, from files to files, as the command line walks it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from loka_toolkit.artifacts import storage
from loka_toolkit.artifacts.dispatch_table import DispatchTable
from loka_toolkit.artifacts.replay_results import ReplayResults
from loka_toolkit.artifacts.safety_map import SafetyMap
from loka_toolkit.errors import ConfigurationError
from loka_toolkit.settings import Settings

Progress = Callable[[str, int, int], None]


def analyze_run(
    run: Path,
    out: Path,
    *,
    settings: Settings,
    recipes: Sequence[str] | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    replay: Path | None = None,
    chip: str | None = None,
    seed: int = 0,
    force: bool = False,
    progress: Progress | None = None,
) -> SafetyMap:
    """Analyze a trace under the settings and save the map; globs given here replace theirs.

    Raises:
        LokaError: If the trace, an argument or the output cannot be used.
    """
    from loka_toolkit.analysis import analyze

    storage.ensure_writable(out, force=force)
    safety = analyze(
        run,
        tolerance=settings.tolerance,
        recipes=list(recipes) if recipes else None,
        include=tuple(include if include is not None else settings.sites.include),
        exclude=tuple(exclude if exclude is not None else settings.sites.exclude),
        replay=ReplayResults.load(replay) if replay is not None else None,
        chip=chip,
        seed=seed,
        progress=progress or False,
    )
    safety.save(out, force=force)
    return safety


def build_table_file(
    safety: Path,
    out: Path,
    *,
    replay: Path | None,
    chip: str | None,
    objective: str | None,
    include: Sequence[str],
    exclude: Sequence[str],
    force: bool,
) -> DispatchTable:
    """Build a dispatch table from files and save it.

    Raises:
        LokaError: If an input, an argument or the output cannot be used.
    """
    from loka_toolkit.dispatch import build_table

    storage.ensure_writable(out, force=force)
    table = build_table(
        safety, replay, chip=chip, objective=objective, include=include, exclude=exclude
    )
    table.save(out, force=force)
    return table


def load_model(factory: str) -> nn.Module:
    """Call the factory named ``package.module:function`` and return the model it makes.

    Raises:
        ConfigurationError: If it cannot be imported, called, or returns something else.
    """
    module_name, separator, attribute = factory.partition(":")
    if not separator or not attribute:
        raise ConfigurationError(f"--model {factory!r} is not of the form package.module:factory")
    try:
        target = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"--model {factory!r} cannot be imported: {error}") from None
    if isinstance(target, nn.Module):
        return target
    if not callable(target):
        raise ConfigurationError(f"--model {factory!r} is neither a model nor a function")
    model = target()
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"--model {factory!r} returned a {type(model).__name__}, not a torch.nn.Module"
        )
    return model
