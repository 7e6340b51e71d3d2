"""`farm` as a call in this process: what it printed and its exit code, without another start of Python, torch and of the programs
that fork children.

No test of its own. What only a process can show (a signal, a kill, the first import) is shown by the tests that start one.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from unittest import mock

from farm.cli import main


def farm_here(*args: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """`farm ARGS` in a folder, with environment variables besides this process's own; warnings are lines of stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as held:
        held.enter_context(mock.patch.dict(os.environ, variables))
        held.enter_context(mock.patch.object(sys, "argv", ["farm", *args]))
        held.enter_context(mock.patch("farm.cli.leave", sys.exit))  # which may end its process at once
        held.enter_context(contextlib.redirect_stdout(out))
        held.enter_context(contextlib.redirect_stderr(err))
        held.enter_context(_warnings_as_lines())
        if cwd is not None:
            held.enter_context(contextlib.chdir(cwd))
        code = _exit_code()
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def _exit_code() -> int:
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


@contextlib.contextmanager
def _warnings_as_lines():
    """As in a new process: those that Python shows by default are printed."""

    def show(message, category, filename, lineno, file=None, line=None) -> None:
        print(warnings.formatwarning(message, category, filename, lineno, line), file=sys.stderr, end="")

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        for hidden in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", hidden)
        warnings.showwarning = show
        yield
