"""cluster.yaml is a file that Ray's cluster launcher takes: checked against the schema in the installed Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

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
    assert not any(word in text for word in ("secret", "token", "aws_access", "10.0."))
