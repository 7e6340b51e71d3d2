"""Whether a catalog's shared objects may be loaded: only from a private local folder, or where the user says so.

A shared object can do all that the process can, before any call. So a folder counts as the user's own only if nobody else can
change what lies in it, or put another folder in its place. A group that has no other member is nobody else: systems that give
each user a group of their own make folders group-writable (umask 002).
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
from pathlib import Path


def host_code_problem(root: Path | None, uri: str) -> str:
    """ "" when shared objects from here may be loaded; else a sentence with the cure. root: the local folder, or None."""
    if root is None:
        return f"{uri} is not a local folder; copy it (`farm catalog merge`) or set allow_host_code"
    folder = Path(os.path.realpath(root))
    try:
        for inside in (folder, *(folder / name for name in ("rows", "journal", "artifacts") if (folder / name).exists())):
            if problem := _changeable(inside.stat()):
                return f"{inside} {problem}; mend it (`chmod -R go-w {folder}`) or set allow_host_code"
        for parent in folder.parents:
            if problem := _replaceable(parent.stat()):
                cure = f"mend it (`chmod go-w {parent}`), " if parent.stat().st_uid == os.geteuid() else ""
                return f"{parent}, which holds the catalog, {problem}; {cure}move the catalog or set allow_host_code"
    except OSError as error:
        return f"{folder} cannot be checked: {error}"
    return ""


def _changeable(status: os.stat_result) -> str:
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}, not to you"
    return _writers(status)


def _writers(status: os.stat_result) -> str:
    if status.st_mode & stat.S_IWOTH:
        return "can be written by other users"
    if status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid):
        return f"can be written by the other members of group {_group_name(status.st_gid)}"
    return ""


@functools.cache
def _is_private_group(gid: int) -> bool:
    """Whether nobody but this user belongs to the group, by the system's lists of users and groups."""
    me = os.geteuid()
    try:
        my_name = pwd.getpwuid(me).pw_name
        members = set(grp.getgrgid(gid).gr_mem) | {user.pw_name for user in pwd.getpwall() if user.pw_gid == gid}
    except (KeyError, OSError):
        return False
    return members <= {my_name}


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _replaceable(status: os.stat_result) -> str:
    """A parent folder may be written by others only with the sticky bit, which keeps them from renaming what is not theirs."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}"
    return "" if status.st_mode & stat.S_ISVTX else _writers(status)
