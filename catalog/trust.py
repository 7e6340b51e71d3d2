"""Whether a catalog's shared objects may be loaded: only from a private local folder, or where the user says so.

A shared object can do all that the process can, before any call. So a folder counts as the user's own only if nobody else can
change what lies in it, or put another folder in its place.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def host_code_problem(root: Path | None, uri: str) -> str:
    """ "" when shared objects from here may be loaded; else a sentence with the cure. root: the local folder, or None."""
    if root is None:
        return f"{uri} is not a local folder; copy it (`farm catalog merge`) or set allow_host_code"
    folder = Path(os.path.realpath(root))
    try:
        for inside in (folder, *(folder / name for name in ("rows", "journal", "artifacts") if (folder / name).exists())):
            if problem := _changeable(inside, inside.stat()):
                return f"{inside} {problem}; mend it (`chmod -R go-w {folder}`) or set allow_host_code"
        for parent in folder.parents:
            if problem := _replaceable(parent.stat()):
                return f"{parent}, which holds the catalog, {problem}; move the catalog or set allow_host_code"
    except OSError as error:
        return f"{folder} cannot be checked: {error}"
    return ""


def file_problem(status: os.stat_result) -> str:
    """The same for the file that was opened: "" or what is wrong with it."""
    return "is not a regular file" if not stat.S_ISREG(status.st_mode) else _changeable_by_others(status)


def _changeable(path: Path, status: os.stat_result) -> str:
    return _changeable_by_others(status)


def _changeable_by_others(status: os.stat_result) -> str:
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}, not to you"
    return "can be written by other users" if status.st_mode & 0o022 else ""


def _replaceable(status: os.stat_result) -> str:
    """A parent folder may be written by others only with the sticky bit, which keeps them from renaming what is not theirs."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}"
    return "can be written by other users" if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX else ""
