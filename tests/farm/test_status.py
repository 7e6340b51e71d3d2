"""`farm status` while a sweep runs and after it ended; files of dead sweeps are taken away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from farm.status import StatusFile, running_sweeps

PLAN = """
name: shown
tuning: {candidates: 1}
models: [{name: prove=1, num_heads: 1, head_dim: 16, seqlens: [5, 6, 7, 8]}]
"""


def farm(tmp_path: Path, *args: str) -> list[str]:
    return [sys.executable, "-m", "farm", *args]


def test_a_running_sweep_is_shown_and_one_that_ended_is_not(tmp_path: Path) -> None:
    environment = os.environ | {"FARM_CACHE": str(tmp_path / "cache")}
    (tmp_path / "plan.yaml").write_text(PLAN)
    argv = farm(tmp_path, "sweep", str(tmp_path / "plan.yaml"), "--stages", "farm.standin", "--executor", "local", "-q")
    running = subprocess.Popen([*argv, "--catalog", str(tmp_path / "c")], env=environment, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 30
    said: list[dict] = []
    while not (said and said[0]["by_reason"]) and time.monotonic() < until:
        said = json.loads(
            subprocess.run(farm(tmp_path, "status", "--json"), env=environment, capture_output=True, text=True).stdout
        )
    assert said[0]["plan"] == "shown" and said[0]["by_reason"].get("ok", 0) >= 1 and said[0]["machine"]["executor"] == "local"
    shown = subprocess.run(farm(tmp_path, "status"), env=environment, capture_output=True, text=True).stdout
    assert "plan shown" in shown and "ended:" in shown
    assert running.wait(60) == 0
    done = subprocess.run(farm(tmp_path, "status"), env=environment, capture_output=True, text=True)
    assert done.stdout == "no sweep is running here\n"


def test_a_dead_sweep_is_forgotten(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    StatusFile(tmp_path, "run", "catalog", "plan").write({"by_reason": {}}, now=True)
    (file,) = (tmp_path / "runs").iterdir()
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"pid": 2**22 + 1, "written_at": time.time() - 1000}))
    assert running_sweeps(tmp_path) == [] and not file.exists()
    file.write_text("{half")
    assert running_sweeps(tmp_path) == []
