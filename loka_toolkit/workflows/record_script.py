"""``loka record``: runs an unmodified training script and records every model that it trains."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import time
from pathlib import Path

import msgspec
from torch import nn

from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.errors import ArtifactError, LokaError, NoMatchError, UnknownNameError
from loka_toolkit.numerics.recipes import DEFAULT_RECIPE_NAMES
from loka_toolkit.numerics.scaling import STATIC_HEADROOM
from loka_toolkit.recording.claim import admitted, launching
from loka_toolkit.recording.discovery import Discovery, FoundModel
from loka_toolkit.recording.events import warn_safely
from loka_toolkit.recording.lineup import unused
from loka_toolkit.recording.modules import ModelNames
from loka_toolkit.recording.recorder import Recorder
from loka_toolkit.recording.schedule import Schedule
from loka_toolkit.recording.settings import RecorderSettings
from loka_toolkit.workflows.script_names import name_in_script
from loka_toolkit.workflows.script_program import Outcome, Program
from loka_toolkit.workflows.summaries import TraceSummary, summarize_trace
from loka_toolkit.workflows.trace_folders import (
    check_free,
    clear_traces,
    folder_name,
    move_trace,
)


@dataclasses.dataclass(frozen=True)
class ScriptOptions:
    """How a script is recorded.

    Attributes:
        out: Directory of the trace, or of one per model.
        schedule: When to record.
        recipes: Names of the recipes to answer for.
        include: Globs of module paths to record; empty for all.
        exclude: Globs of module paths to leave out.
        model: Name of the only model to record; None for all.
        seed: Seed of the recorder's sampling; the script's own seeds are its own.
        force: Overwrite traces.
    """

    out: Path
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    recipes: tuple[str, ...] = DEFAULT_RECIPE_NAMES
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    model: str | None = None
    seed: int = 0
    force: bool = False

    def settings(
        self, path: Path, include: tuple[str, ...], exclude: tuple[str, ...]
    ) -> RecorderSettings:
        """Return the validated settings of one recorder.

        Raises:
            ConfigurationError: If an option is wrong.
        """
        return RecorderSettings.validated(
            path,
            schedule=self.schedule,
            recipes=self.recipes,
            include=include,
            exclude=exclude,
            rank=None,
            world_size=None,
            max_rows=256,
            max_columns=256,
            headroom=STATIC_HEADROOM,
            moments_width=1024,
            seed=self.seed,
            force=self.force,
        )


class ScriptModel(msgspec.Struct, frozen=True):
    """A model that the script trained.

    Attributes:
        name: The variable that holds it, else its class.
        type: Its class.
        notes: What a reader must know of how it was recorded, or why it was not.
        trace: What its trace holds; null where it was not recorded.
    """

    name: str
    type: str
    notes: tuple[str, ...]
    trace: TraceSummary | None


class ScriptSummary(msgspec.Struct, frozen=True):
    """What came of recording a script.

    Attributes:
        program: The script.
        outcome: How it ended.
        rank: Which of several processes speaks: the first one reads the traces.
        models: The models that it trained.
        problem: Why nothing was recorded; null if something was.
        failures: What went wrong inside of loka.
    """

    program: str
    outcome: Outcome
    rank: int
    models: tuple[ScriptModel, ...]
    problem: str | None
    failures: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """Exit code of ``loka record``."""
        if self.outcome.interrupted:
            return 130
        return int(self.outcome.code != 0 or self.problem is not None)

    @property
    def complaints(self) -> list[str]:
        """Why the exit code is not 0."""
        if self.outcome.message:
            return [f"{self.program} {self.outcome.message}"]
        return [self.problem] if self.problem else []


def record_script(program: Program, options: ScriptOptions) -> ScriptSummary:
    """Run a script and record the models that it trains.

    Args:
        program: The script; its prints, its exit and its files are its own.
        options: How to record.

    Returns:
        What was recorded, also where the script failed or was interrupted.

    Raises:
        ConfigurationError: If an option is wrong, or a recorder or another launcher is open.
        ArtifactExistsError: If something is at the path and overwriting was not asked for.
    """
    options.settings(options.out, options.include, options.exclude)
    is_first_rank = os.environ.get("RANK", "0") == "0"
    if is_first_rank:
        check_free(options.out, force=options.force)
    # The script may change its directory.
    options = dataclasses.replace(options, out=options.out.absolute())
    with launching("loka record"):
        return _ScriptRun(program, options).run()


class _ScriptRun:
    """One run of a script."""

    def __init__(self, program: Program, options: ScriptOptions) -> None:
        self._program = program
        self._options = options
        self._process = os.getpid()
        self._rank = 0
        self._paths: dict[str, Path] = {}
        self._notes: dict[str, str] = {}
        self._unmatched = dict.fromkeys((*options.include, *options.exclude))
        self._modules: set[str] = set()
        self._abort: LokaError | None = None
        self._discovery = Discovery(self._open, self._name_of)

    def run(self) -> ScriptSummary:
        discovery = self._discovery
        discovery.install()
        try:
            outcome = self._program.run(passes=lambda error: error is self._abort)
        finally:
            if os.getpid() == self._process:
                discovery.close()
        if os.getpid() != self._process:
            raise SystemExit(outcome.code)  # a fork of the script: the traces are its parent's
        if self._abort is not None:
            raise self._abort
        self._arrange_folders()
        self._check_names()
        return ScriptSummary(
            program=self._program.name,
            outcome=outcome,
            rank=self._rank,
            models=tuple(self._describe(model) for model in discovery.models),
            problem=self._problem(),
            failures=tuple(discovery.failures),
        )

    # What discovery asks for

    def _name_of(self, module: nn.Module) -> str | None:
        program = self._program
        return name_in_script(module, vars(program.main), program.file)

    def _open(self, name: str, model: nn.Module, *, has_others: bool) -> Recorder | None:
        """Open the recorder of a model; what is wrong with the first one stops the script."""
        options = self._options
        if options.model is not None and name != options.model:
            self._notes[name] = f"not recorded: --model {options.model} was asked for"
            return None
        try:
            modules = sorted(set(ModelNames.of(model).types))
            include, exclude = options.include, options.exclude
            if has_others:
                include, exclude = (self._matching(p, modules) for p in (include, exclude))
                if options.include and not include:
                    self._notes[name] = "not recorded: no --include matches one of its modules"
                    return None
            path = options.out
            if has_others and options.model is None:
                taken = (p.name for p in self._paths.values())
                path = options.out / unused(folder_name(name), taken)
            settings = options.settings(path, include, exclude)
            if options.force and not self._paths:
                clear_traces(options.out, settings.rank)
            with admitted():
                recorder = Recorder(model, settings).__enter__()
        except LokaError as error:
            if not self._paths:
                self._abort = error
                raise
            self._notes[name] = f"not recorded: {error}"
            warn_safely(f"loka record: {name} is not recorded: {error}")
            return None
        self._rank, self._paths[name] = settings.rank, path
        for pattern in self._matching((*options.include, *options.exclude), modules):
            self._unmatched.pop(pattern, None)
        return recorder

    def _matching(self, patterns: tuple[str, ...], modules: list[str]) -> tuple[str, ...]:
        self._modules.update(modules)
        return tuple(p for p in patterns if any(fnmatch.fnmatchcase(m, p) for m in modules))

    # What is left at the end

    def _arrange_folders(self) -> None:
        """Put a single trace into RUN itself, and each of several into a directory of its own."""
        out = self._options.out
        taken = [path.name for path in self._paths.values()]
        for name, path in self._paths.items():
            target = path
            if len(self._paths) == 1:
                target = out
            elif path == out:
                target = out / unused(folder_name(name), taken)
            if target != path:
                try:
                    move_trace(path, target, self._rank)
                except OSError as error:
                    self._notes[name] = f"its trace stays in {path}: {error.strerror or error}"
                else:
                    self._paths[name] = target

    def _check_names(self) -> None:
        names = [model.name for model in self._discovery.models]
        if self._options.model is not None and names and self._options.model not in names:
            raise UnknownNameError("model", self._options.model, names)
        for pattern in self._unmatched if self._paths else ():
            raise NoMatchError("module", pattern, self._modules)

    def _describe(self, model: FoundModel) -> ScriptModel:
        notes = [*model.notes]
        if model.name in self._notes:
            notes.append(self._notes[model.name])
        trace = None
        # Of several ranks the first one speaks.
        if model.name in self._paths and self._rank == 0:
            try:
                trace = _read_summary(self._paths[model.name])
            except (LokaError, OSError) as error:
                notes.append(f"its trace cannot be read: {error}")
        return ScriptModel(
            name=model.name,
            type=type(model.lineup.model).__name__,
            notes=tuple(notes),
            trace=trace,
        )

    def _problem(self) -> str | None:
        """Return why nothing was recorded."""
        discovery, name = self._discovery, self._program.name
        if any(m.recorder is not None and m.recorder.steps_recorded for m in discovery.models):
            return None
        if any(m.recorder is not None and m.recorder.steps_seen for m in discovery.models):
            return "no step was recorded; the events of the trace say why"
        if discovery.models and all(model.recorder is None for model in discovery.models):
            return "no model was recorded"
        if discovery.was_called_elsewhere and not discovery.models:
            why = "its modules were called in another thread, and only the main one is followed"
        elif discovery.models:
            why = "no optimizer stepped with gradients after a forward was seen"
        elif discovery.has_stepped:
            why = "its optimizers hold no parameter of a torch.nn.Module"
        elif discovery.was_called:
            why = (
                "no torch.optim optimizer holds parameters of the modules that were called with "
                "gradients"
            )
        else:
            why = "no torch.nn.Module with parameters was called with gradients"
        return f"{name} trained nothing that can be recorded: {why}"


def _read_summary(path: Path, patience: int = 5) -> TraceSummary:
    """Return what a trace holds; other ranks may be merging files of theirs this very moment."""
    for _ in range(patience):
        try:
            return summarize_trace(Trace.open(path))
        except (OSError, ArtifactError):
            time.sleep(0.5)
    return summarize_trace(Trace.open(path))
