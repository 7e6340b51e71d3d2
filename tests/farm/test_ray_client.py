"""A sweep through Ray's client, as from a laptop, on a cluster one of whose nodes really has another version of the farm."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from catalog import audit, store

pytest.importorskip("farm.session")
ROOT = Path(__file__).parents[2]
PLAN = """
name: client
targets: [sm_80, sm_90a]
dtypes: [fp16]
tuning: {candidates: 2}
models: [{name: prove=0.05, num_heads: 1, head_dim: 16, seqlens: [5, 6, 7]}]
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A head with Ray's client server, an A100 node, and an H200 node that imports an edited copy of the packages: stand-ins."""
    pytest.importorskip("grpc")
    from ray.cluster_utils import Cluster

    copy = tmp_path_factory.mktemp("another-version")
    for package in ("catalog", "farm", "generator", "verifier"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "verifier" / "judge.py").open("a").write("# another version\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        made = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "resources": {"class_head": 1}, "ray_client_server_port": port},
        )
        made.add_node(num_cpus=1, num_gpus=1, resources={"class_a100": 1}, object_store_memory=80 << 20)
        patch.setenv("PYTHONPATH", str(copy))
        made.add_node(num_cpus=1, num_gpus=1, resources={"class_h200": 1}, object_store_memory=80 << 20)
    made.wait_for_nodes()
    yield f"ray://127.0.0.1:{port}"
    made.shutdown()


@pytest.mark.slow
def test_a_sweep_through_rays_client_and_a_node_with_another_version(address: str, tmp_path: Path) -> None:
    """Author, builder and device are actors there; what the other version's node would have judged ends as rows that say why."""
    (tmp_path / "plan.yaml").write_text(PLAN)
    argv = [sys.executable, "-m", "farm", "sweep", str(tmp_path / "plan.yaml"), "--stages", "farm.standin", "--json"]
    argv += ["--catalog", str(tmp_path / "c"), "--address", address, "--allow-missing"]
    environment = os.environ | {"FARM_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    for _ in range(3):
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=150)
        if "Starting Ray client server failed" not in done.stderr:
            break  # Ray gives the process behind a client 30 s to come up, too few on a busy machine; nothing was begun then
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["planned"] == sum(summary["by_reason"].values())
    opened = store.open(tmp_path / "c")
    rows = opened.rows(["target", "reason_code", "message", "ray_node_id"]).to_pylist()
    assert Counter((row["target"], row["reason_code"]) for row in rows) == {("sm_80", "ok"): 9, ("sm_90a", "missing_device"): 6}
    why = {row["message"] for row in rows if row["target"] == "sm_90a"}
    assert len(why) == 1 and "every node that has a device for it is refused" in (said := why.pop()) and "harness is" in said
    assert f"refused: {said.partition('): ')[2]}" in done.stderr, "preflight tells it, too"
    assert audit.verify(opened, artifacts=False).errors == ()
