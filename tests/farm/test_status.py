"""`farm status` while a sweep runs and after it ended; files of dead sweeps are taken away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from farm_here import farm_here

from farm.machine_view import machine_lines
from farm.status import StatusFile, running_sweeps

PLAN = """
name: shown
tuning: {candidates: 1}
models: [{name: prove=1, num_heads: 1, head_dim: 16, seqlens: [5, 6, 7, 8]}]
"""


def test_a_running_sweep_is_shown_and_one_that_ended_is_not(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    environment = os.environ | {"FARM_CACHE": cache}
    (tmp_path / "plan.yaml").write_text(PLAN)
    argv = [sys.executable, "-m", "farm", "sweep", str(tmp_path / "plan.yaml"), "--stages", "farm.standin"]
    argv += ["--executor", "local", "-q", "--catalog", str(tmp_path / "c")]
    running = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 120
    said: list[dict] = []
    while not (said and said[0]["by_reason"]) and time.monotonic() < until:
        time.sleep(0.1)
        said = json.loads(farm_here("status", "--json", FARM_CACHE=cache).stdout)
    assert said[0]["plan"] == "shown" and said[0]["by_reason"].get("ok", 0) >= 1 and said[0]["machine"]["executor"] == "local"
    shown = farm_here("status", FARM_CACHE=cache).stdout
    assert "plan shown" in shown and "ended:" in shown
    assert running.wait(60) == 0
    assert farm_here("status", FARM_CACHE=cache).stdout == "no sweep is running here\n"


def test_a_dead_sweep_is_forgotten(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    StatusFile(tmp_path, "run", "catalog", "plan").write({"by_reason": {}}, now=True)
    (file,) = (tmp_path / "runs").iterdir()
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"pid": 2**22 + 1, "written_at": time.time() - 1000}))
    assert running_sweeps(tmp_path) == [] and not file.exists()
    file.write_text("{half")
    assert running_sweeps(tmp_path) == []


def device(name: str, **facts: object) -> dict:
    return {"device": "cuda:0", "node": "n1", "class": name, "about": name, "facts": {}, "out_of_service": "", "in_hand": 1,
            "ended": 5, "busy": 0.9} | facts  # fmt: skip


def state(devices: list[dict]) -> dict:
    return {
        "executor": "ray", "waiting": 3, "building": 2, "built": 1, "devices": devices, "dashboard": "http://127.0.0.1:8265",
        "queues": [{"target": "sm_75", "class": "t4", "to_build": 3, "to_judge": 1}],
        "nodes": [{"alive": True, "cpus": 4.0}, {"alive": True, "cpus": 8.0}, {"alive": False, "cpus": 4.0}],
    }  # fmt: skip


def test_a_cluster_is_told_node_by_class_and_queue() -> None:
    facts = {"compute_capability": "8.0", "memory_bytes": 80 << 30, "mig": 0, "copy_bytes_per_s": 1.5e12, "matmul_flops_per_s": 2.5e14, "dtype": "fp16"}  # noqa: E501  # fmt: skip
    shown = machine_lines(state([device("a100", facts=facts), device("t4", out_of_service="its node left the cluster")]))
    assert shown[0] == "2 nodes with 12 CPUs; 1 left the cluster"
    assert "queue of t4, sm_75: 3 to build, 1 to judge" in shown
    assert any("a100" in line and "90% busy" in line and "8.0, 80 GiB, 1.5e+03 GB/s, 250 TFLOP/s fp16" in line for line in shown)
    assert "cuda:0 (t4) of node n1: out of service: its node left the cluster" in shown
    assert shown[-1] == "Ray's dashboard: http://127.0.0.1:8265"


def test_a_device_that_has_not_said_what_it_is_is_starting() -> None:
    (_, *_, told, _) = machine_lines(state([device("t4", starting=True)]))
    assert told == "cuda:0 (t4) of node n1: starting, or waiting until another sweep leaves it"


def test_hundreds_of_devices_are_told_class_by_class_and_those_out_of_service_one_by_one() -> None:
    shown = machine_lines(state([device("a100")] * 300 + [device("t4", out_of_service="3 deaths in a row")] * 2))
    assert "300 x a100: 90% busy, 300 in hand, 1500 ended" in shown and len(shown) < 10
    assert sum("3 deaths in a row" in line for line in shown) == 2
