"""Who else is on a GPU while we time there. A lock of ours binds only those who take it; the driver's list shows the others."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from verifier.gpu import use_of


def strangers_on(device: str) -> dict[int, str]:
    """Process id -> name of those that the driver lists on a GPU and that neither are ours nor come of us; none on a CPU.

    Ids that this process cannot see (of the host, from within a container) are left out: they may be our own children.
    """
    if device == "cpu":
        return {}
    listed = [pid for pid, _ in use_of(device).processes]
    return {pid: _name(pid) for pid in listed if Path(f"/proc/{pid}").exists() and not _is_ours(pid)}


def _is_ours(pid: int) -> bool:
    """Whether it is this process, or was started by it or by one that was."""
    try:
        return pid == os.getpid() or any(parent.pid == os.getpid() for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return True  # gone meanwhile


def _name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "gone"
