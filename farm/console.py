"""How the command line ends and speaks: one line for bad input, exit codes, plain lines. Knows no command."""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import shlex
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

#: The base of typer's errors of usage; typer brings click under a name of its own, or uses the installed one.
_UsageProblem: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

CatalogOption = Annotated[
    str | None,
    typer.Option("--catalog", "-c", help="Folder or URI. Default: $FARM_CATALOG, else ~/.local/share/kernel-farm/catalog."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]

EXIT_OK, EXIT_FAILED, EXIT_INPUT, EXIT_BROKEN_OFF, EXIT_STOPPED = 0, 1, 2, 3, 130


def printable(text: str) -> str:
    """On one line, with nothing in it that steers a terminal: names of files hold what they like."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)


class InputError(ValueError):
    """A flag, argument or file of the user's that cannot be used: the name of the field and what to do about it."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{printable(name)}: {message}" if name else message)


class _Command(typer.core.TyperCommand):
    """A command to which an option or argument without a text is a slip, such as a variable that is not set, and never a way to
    leave it out.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises InputError that names the option."""
        given, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for parameter in order:
            values = given.get(parameter.name or "")
            if any(isinstance(v, str) and not v.strip() for v in (values if isinstance(values, list | tuple) else [values])):
                name = max(parameter.opts, key=len) if parameter.param_type_name == "option" else (parameter.name or "").upper()
                raise InputError(name, "expected a value, found an empty text")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """An interrupt is what `guard` has a word for; typer would end without one."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None


class App(typer.Typer):
    """A group of our commands."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        return super().command(name, **{"cls": _Command} | settings)


def check_writable(name: str, path: Path) -> None:
    """Before the work whose result goes to the file that `name` names. Raises InputError where it could not be written.

    One rule for all commands: a file goes into a folder that is there, so that a slip of the pen makes no folders; folders that
    are themselves the result (catalogs, copies of artifacts) are made.
    """
    if not str(path).strip(" ."):
        raise InputError(name, f"expected the name of a file, found {str(path)!r}")
    if why := _unwritable(path):
        raise InputError(name, f"{path}: cannot be written: {why}")


def _unwritable(path: Path) -> str:
    """Why nothing can be written there; "" where it seems that it can."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "" if path.absolute().parent.is_dir() else f"no such folder; mkdir -p {shlex.quote(str(path.parent))}"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    if stat.S_ISFIFO(mode):
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return "is a pipe that nobody reads"
    return "is a directory" if stat.S_ISDIR(mode) else ""


@contextlib.contextmanager
def writing(name: str, path: Path) -> Iterator[Path]:
    """Around the writing of that file, to the path that is given: it gets its name when it is whole, so that on a full disk what
    had the name before stays. Raises InputError where it fails.
    """
    target = Path(os.path.realpath(path))
    apart = (target.is_file() or not target.exists()) and os.access(
        target.parent, os.W_OK
    )  # a pipe or device is written in place
    fresh = target.with_name(f".farm-{os.getpid()}.tmp") if apart else target
    try:
        yield fresh
        if apart:
            if target.exists():
                shutil.copymode(target, fresh)
            os.replace(fresh, target)
    except OSError as error:
        raise InputError(name, f"{path}: cannot be written: {(error.strerror or str(error)).lower()}") from None
    finally:
        if apart:
            fresh.unlink(missing_ok=True)


#: Of one line of a message: what the user gave may be of any length, and is in it.
LONGEST_LINE = 500
#: Of one message: the rest is counted.
MOST_LINES = 24


def fail(message: str) -> None:
    """One line on standard error; what the user gave is in it, so that nothing of it may steer the terminal."""
    line = printable(message)
    if len(line) > LONGEST_LINE:
        line = f"{line[: LONGEST_LINE - 160]} [...] {line[-150:]}"
    print(f"farm: {line}", file=sys.stderr)


def fail_lines(message: str) -> None:
    """A message of several findings, a line each, as far as a screen goes."""
    lines = message.splitlines()
    for line in lines[:MOST_LINES]:
        fail(line)
    if len(lines) > MOST_LINES:
        fail(f"{len(lines) - MOST_LINES} more lines")


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _is_input_error(error: BaseException) -> bool:
    """Errors of input are ValueErrors of our own packages; a ValueError of a library is a fault of ours."""
    module = type(error).__module__.partition(".")[0]
    return isinstance(error, ValueError) and module in ("farm", "generator", "verifier", "catalog")


def guard(app: Callable[..., Any]) -> int:
    """Runs the command line and gives its exit code; no traceback for anything that is the user's to mend."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed before the start: its number must not go to a file that matters
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the rest of this process
    try:
        code = app(standalone_mode=False) or EXIT_OK
        if sys.stdout is not None:
            sys.stdout.flush()  # while an error of it can still be told
        return code
    except typer.Exit as error:
        return error.exit_code
    except _UsageProblem as error:
        said = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        if said:  # none for a command alone, whose help was printed
            fail(said + _hint(error))
        return EXIT_INPUT
    except (typer.Abort, KeyboardInterrupt):
        fail("stopped")
        return EXIT_STOPPED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # a reader such as `head` went away
        return EXIT_OK
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it has nowhere to go
        fail("standard output cannot be written: no space left on device")
        return EXIT_FAILED
    except ValueError as error:
        if not _is_input_error(error):
            raise
        fail_lines(str(error))
        return EXIT_INPUT


#: The exit code, from the moment that `leave` is called.
_leaving: list[int] = []
#: Set where a library that this process used cannot be taken apart any more.
_broken = threading.Event()


def leave(code: int) -> NoReturn:
    """End the process. Where a stopped sweep left a job's thread inside a library, or one is broken, at once, as soon as all that
    was registered with atexit has run: Python cannot end such a thread, and the library would abort the process when Python takes
    itself apart around it.
    """
    _leaving.append(code)
    sys.exit(code)


def library_is_broken() -> None:
    """Say that a library would wait, or end this process by a signal, while Python takes itself apart: `leave` goes before."""
    _broken.set()


def _end_at_once() -> None:
    """Runs after all else at exit, since it was registered before all else: what is registered last runs first."""
    inside = any(thread.daemon and thread.name.startswith("farm-") for thread in threading.enumerate())
    if not _leaving or not (inside or _broken.is_set()):
        return
    logging.shutdown()  # registered when logging was imported, which is still earlier
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(_leaving[0])


atexit.register(_end_at_once)


def _hint(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return f" (see {context.command_path} --help)" if context else ""
