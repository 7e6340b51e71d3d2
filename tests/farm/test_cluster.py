"""cluster.yaml is a file that Ray's cluster launcher takes: checked against the schema in the installed Ray."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from farm.nodes import node_wishes, unmet_targets

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "cluster.yaml").read_text())


def test_ray_takes_the_file() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    ray = pytest.importorskip("ray")
    schema = json.loads((Path(ray.__file__).parent / "autoscaler/ray-schema.json").read_text())
    jsonschema.validate(CONFIG, schema)


def test_every_gpu_class_has_a_node_type_with_its_own_resource() -> None:
    types = CONFIG["available_node_types"]
    assert CONFIG["head_node_type"] in types and "GPU" not in types[CONFIG["head_node_type"]]["resources"]
    for name in ("t4", "rtx8000", "a100", "h100", "h200"):
        resources = types[name]["resources"]
        assert resources["GPU"] == resources[f"class_{name}"] >= 1, name
        assert resources["CPU"] >= 1, f"{name}: actors wait for ever where no CPU is given"
    assert sum(t.get("max_workers", 0) for t in types.values()) <= CONFIG["max_workers"]


def test_no_secret_and_no_machine_of_ours() -> None:
    text = (ROOT / "cluster.yaml").read_text().lower()
    assert not any(word in text for word in ("secret", "ray_auth_token", "aws_access", "10.0."))


def test_every_node_of_every_example_says_whether_ray_asks_for_a_token() -> None:
    """Ray 2.60 asks for one where one happens to lie in a home: a cluster of homes that differ would not come together."""
    starts = [c for kind in ("head", "worker") for c in CONFIG[f"{kind}_start_ray_commands"] if "ray start" in c]
    assert len(starts) == 2 and all(c.startswith("RAY_AUTH_MODE=disabled ") for c in starts)
    groups = [KUBERAY["spec"]["headGroupSpec"], *KUBERAY["spec"]["workerGroupSpecs"]]
    containers = [c for group in groups for c in group["template"]["spec"]["containers"]]
    assert len(containers) == 4 and all({"name": "RAY_AUTH_MODE", "value": "disabled"} in c["env"] for c in containers)


KUBERAY = yaml.safe_load((ROOT / "examples/clusters/kuberay.yaml").read_text())


def test_kuberays_groups_are_what_rays_autoscaler_reads() -> None:
    """Ray's own reader of RayCluster objects makes node types of it: resources, limits of workers, the idle timeout."""
    producer = pytest.importorskip("ray.autoscaler._private.kuberay.autoscaling_config")
    found = producer._derive_autoscaling_config_from_ray_cr(KUBERAY | {"metadata": KUBERAY["metadata"] | {"namespace": "farm"}})
    schema = json.loads((Path(producer.__file__).parents[2] / "ray-schema.json").read_text())
    pytest.importorskip("jsonschema").validate(found, schema)
    types = {name.removesuffix("-group"): t for name, t in found["available_node_types"].items()}
    assert found["idle_timeout_minutes"] == 10
    assert types["headgroup"]["resources"] | {"memory": 0} == {"CPU": 0, "class_head": 1, "memory": 0}
    for name in ("t4", "a100"):
        assert (
            types[name]["resources"]["GPU"] == types[name]["resources"][f"class_{name}"] == 1 and types[name]["min_workers"] == 0
        )
    assert types["builder"]["min_workers"] == 1 and "GPU" not in types["builder"]["resources"]


def test_kuberays_ray_is_the_one_that_is_pinned() -> None:
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("ray=="))
    assert KUBERAY["spec"]["rayVersion"] == pinned.partition("==")[2].strip()


THREE_MACHINES = ["sh", str(ROOT / "examples/clusters/three_machines.sh")]


@pytest.mark.parametrize(("said", "mode"), [({}, "disabled"), ({"RAY_AUTH_MODE": "token"}, "token")], ids=["default", "token"])
def test_three_machines_join_with_commands_that_ray_takes(said: dict[str, str], mode: str) -> None:
    """Every `ray start` of the script is parsed by Ray's own command line; the farm finds a device for every class."""
    scripts = pytest.importorskip("ray.scripts.scripts")
    # A process that started Ray has a mode of its own in its environment.
    shell = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    argv = [*THREE_MACHINES, "up"]
    done = subprocess.run(argv, env=shell | said | {"DRY_RUN": "1", "ENV": "/env/bin"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line.partition(": ")[2]) for line in done.stdout.splitlines()]
    assert [c[:3] for c in commands] == [[f"RAY_AUTH_MODE={mode}", "/env/bin/ray", "start"]] * 3
    nodes = []
    for number, command in enumerate(commands):
        given = scripts.start.make_context("start", command[3:]).params
        cpus, gpus = given["num_cpus"] or 8, given["num_gpus"] or 0
        resources = {"CPU": cpus, "GPU": gpus} | json.loads(given["resources"])
        nodes.append({"NodeID": str(number), "Alive": True, "Resources": resources})
        assert given["head"] == (number == 0) and (number == 0 or given["address"] == "head.example.com:6379")
    assert not unmet_targets(("sm_75", "sm_80"), nodes)
    assert [w.expected_class for w in node_wishes(("sm_75", "sm_80"), nodes)] == ["a100", "a100", "rtx8000"]


def test_three_machines_without_a_word_explain_themselves() -> None:
    usage = subprocess.run(THREE_MACHINES, capture_output=True, text=True)
    assert usage.returncode == 2 and "up | down" in usage.stderr


def test_what_no_node_can_meet_is_named_with_the_cure() -> None:
    nodes = [{"NodeID": "a", "Alive": True, "Resources": {"CPU": 8, "class_t4": 1}}]
    unmet = unmet_targets(("sm_75", "sm_80", "cpu-avx2"), nodes)
    assert list(unmet) == ["sm_80", "cpu-avx2"]
    assert "class_a100" in unmet["sm_80"] and "--resources" in unmet["sm_80"] and "class_cpu" in unmet["cpu-avx2"]
