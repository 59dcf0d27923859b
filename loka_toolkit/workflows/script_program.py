"""Runs a script or a module as Python would run it: as ``__main__``, in this process."""

from __future__ import annotations

import atexit
import contextlib
import importlib.machinery
import importlib.util
import io
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from loka_toolkit.errors import ConfigurationError


class Outcome(msgspec.Struct, frozen=True):
    """How a script ended.

    Attributes:
        code: The exit code that Python would have given.
        message: Why it is not 0, for example ``raised ValueError``; None if it is.
        interrupted: Whether it was by Ctrl-C.
    """

    code: int = 0
    message: str | None = None
    interrupted: bool = False


class Program:
    """A script, or a module as after ``python -m``.

    Args:
        target: Path of the script, or name of the module.
        arguments: Its own arguments.
        is_module: Which of the two it is.

    Raises:
        ConfigurationError: If the script is not there or cannot be read.
    """

    def __init__(self, target: str, arguments: Sequence[str], *, is_module: bool) -> None:
        self.target = target
        self.arguments = list(arguments)
        self.is_module = is_module
        self.main = types.ModuleType("__main__")
        self.file = target
        if not is_module:
            _check_script(Path(target))
            self.file = str(Path(target).absolute())

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return f"module {self.target}" if self.is_module else self.target

    def run(self, passes: Callable[[BaseException], bool] = lambda _: False) -> Outcome:
        """Run it to its end, printing its traceback if it fails.

        Args:
            passes: Whether an exception that comes out of it is not its own, but the caller's.

        Raises:
            ConfigurationError: If a module cannot be found.
            BaseException: What ``passes`` lets pass.
        """
        with self._as_main():
            # Loading a module runs the packages around it, which are part of the program.
            outcome = self._guarded(self._load, lambda e: isinstance(e, ConfigurationError))
            return outcome or self._guarded(self._execute, passes) or Outcome()

    def _load(self) -> None:
        if self.is_module:
            self._find_module()
        else:
            loader = importlib.machinery.SourceFileLoader("__main__", self.file)
            self.main.__dict__.update(__file__=self.file, __loader__=loader, __cached__=None)
            with io.open_code(self.file) as file:
                self._code = compile(file.read(), self.file, "exec", dont_inherit=True)

    def _execute(self) -> None:
        exec(self._code, self.main.__dict__)

    def _find_module(self) -> None:
        name = self.target
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                name = f"{name}.__main__"
                spec = importlib.util.find_spec(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                raise  # something that a package around it imports
            spec = None
        except ValueError as error:
            raise ConfigurationError(f"cannot run module {self.target!r}: {error}") from None
        if spec is None or spec.loader is None or not hasattr(spec.loader, "get_code"):
            raise ConfigurationError(
                f"no module {name!r} to run, from {Path.cwd()} and sys.path; after -m comes the "
                "name of a module, not a path"
            )
        code = spec.loader.get_code(name)
        if code is None:
            raise ConfigurationError(f"module {name!r} has no Python code to run")
        self._code = code
        self.file = spec.origin or name
        self.main.__dict__.update(
            __file__=spec.origin,
            __spec__=spec,
            __loader__=spec.loader,
            __package__=spec.parent,
            __cached__=spec.cached,
        )
        sys.argv[0] = self.file

    def _guarded(
        self, action: Callable[[], None], passes: Callable[[BaseException], bool]
    ) -> Outcome | None:
        """Run a part of it; return how it ended unless it came to its end."""
        try:
            action()
        except SystemExit as ending:
            return _outcome_of_exit(ending)
        except KeyboardInterrupt:
            return Outcome(130, "was interrupted", interrupted=True)
        except BaseException as error:
            if passes(error):
                raise
            sys.stdout.flush()
            error.__traceback__ = _without_us(error.__traceback__)
            sys.excepthook(type(error), error, error.__traceback__)
            return Outcome(1, f"raised {type(error).__name__}")
        return None

    @contextlib.contextmanager
    def _as_main(self) -> Iterator[None]:
        """Make the process look as Python makes it for a script."""
        self.main.__dict__["__builtins__"] = __builtins__
        before = sys.modules["__main__"], sys.argv, list(sys.path)
        sys.modules["__main__"] = self.main
        sys.argv = [self.target, *self.arguments]
        if not sys.flags.safe_path:
            first = str(Path.cwd()) if self.is_module else str(Path(self.file).resolve().parent)
            sys.path[:1] = [first]
        try:
            with _default_interrupt():
                yield
        finally:
            arguments, path = sys.argv, list(sys.path)
            sys.modules["__main__"], sys.argv, sys.path[:] = before

            def reinstate() -> None:
                # What the script registered to run at exit finds itself as __main__.
                sys.modules["__main__"], sys.argv, sys.path[:] = self.main, arguments, path

            atexit.register(reinstate)


def _without_us(place: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback from the script's first frame on."""
    while place is not None and place.tb_frame.f_code.co_filename == __file__:
        place = place.tb_next
    return place


def _check_script(path: Path) -> None:
    if path.is_dir():
        raise ConfigurationError(f"{path} is a directory; name a script, or a module after -m")
    if not path.exists():
        raise ConfigurationError(f"there is no script {path}; options of loka come before it")
    if path.suffix in (".pyc", ".zip", ".pyz"):
        raise ConfigurationError(f"{path} is no Python source; name a script, or a module after -m")


def _outcome_of_exit(ending: SystemExit) -> Outcome | None:
    """Return what Python makes of ``sys.exit(...)``."""
    code = ending.code
    if code is None or code == 0:
        return Outcome()
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    return Outcome(code, f"exited with code {code}")


@contextlib.contextmanager
def _default_interrupt() -> Iterator[None]:
    """Let Ctrl-C mean to the script what it means without us."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
