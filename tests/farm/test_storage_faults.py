"""A disk that is really full, and a shared folder that is really gone: in a mount namespace of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from storage_faults import ATTEMPTS

HERE = Path(__file__).parent
UNSHARE = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]


def faulty(tmp_path: Path, *args: str, timeout_s: float = 200) -> dict[str, Any]:
    """What came of a sweep in such a namespace; skips where the system allows none."""
    allowed = subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True, text=True)
    if allowed.returncode:
        pytest.skip(f"no mount namespace here: {allowed.stderr.strip()}")
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    argv = [*UNSHARE, sys.executable, str(HERE / "storage_faults.py"), args[0], str(tmp_path), *args[1:]]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["planned"] == found["rows"] == ATTEMPTS and found["reasons"] == ["ok"] and found["tries"] == 1
    assert found["done"] == [1] * ATTEMPTS, "nothing is made twice"
    assert found["errors"] == [] and found["stop_reason"] == ""
    return found


def test_a_disk_that_is_full_is_waited_for_and_costs_no_attempt(tmp_path: Path) -> None:
    found = faulty(tmp_path, "full")
    assert found["stored_while_full"] <= 1 and "the disk is full; make room" in found["notes"][0]


def test_a_mount_that_is_gone_is_waited_for_and_nothing_is_made_in_its_place(tmp_path: Path) -> None:
    found = faulty(tmp_path, "gone", "2", "4")
    assert found["made_in_its_place"] == [] and found["notes_before"] >= 1
    assert "is its folder mounted?" in found["notes"][0]


@pytest.mark.soak
def test_a_mount_that_is_gone_for_a_minute(tmp_path: Path) -> None:
    """With the patience of a real sweep."""
    found = faulty(tmp_path, "gone", "60", "180", timeout_s=400)
    assert found["made_in_its_place"] == [] and found["notes_before"] >= 10
