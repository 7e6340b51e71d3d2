"""Which device judges which target; classes of cards by their names; GPUs that are not here are told by facts."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm import devices, stages
from farm.devices import LocalDevice, class_of, targets_of
from farm.jobs import Job, Shop
from farm.nodes import builder_rooms, local_wishes, node_wishes
from farm.places import Place, places_of
from generator.spec import AttentionSpec


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Tesla T4", "t4"),
        ("Quadro RTX 8000", "rtx8000"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA H100 NVL", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L40S", "nvidia-l40s"),
        ("Tesla T40", "tesla-t40"),
    ],
)
def test_classes_by_name(name: str, expected: str) -> None:
    assert class_of(name) == expected


@pytest.mark.parametrize(
    ("capability", "own", "older"),
    [
        ((7, 5), ("sm_75",), ()),
        ((8, 0), ("sm_80",), ("sm_75",)),
        ((8, 9), ("sm_80",), ("sm_75",)),
        ((9, 0), ("sm_90a",), ("sm_75", "sm_80")),
        ((10, 0), (), ("sm_75", "sm_80")),
        ((7, 0), (), ()),
    ],
)
def test_targets_by_capability(capability: tuple[int, int], own: tuple[str, ...], older: tuple[str, ...]) -> None:
    assert targets_of(*capability) == (own, older)


def test_a_card_of_its_own_comes_before_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = LocalDevice("cuda:0", "h200", "NVIDIA H200", "a", ("sm_90a", "sm_75", "sm_80"), ("sm_75", "sm_80"), "sm_90")
    a100 = LocalDevice("cuda:1", "a100", "NVIDIA A100", "b", ("sm_80", "sm_75"), ("sm_75",), "sm_80")
    monkeypatch.setattr(devices, "devices_here", lambda: (h200, a100))
    assert devices.device_for("sm_80") is a100 and devices.arch_for("sm_80") is None
    assert devices.device_for("sm_90a") is h200 and devices.arch_for("sm_90a") is None
    assert devices.arch_for("sm_75") == "sm_90"
    assert devices.device_for("cpu-avx2") is None


def test_places_are_kinds_of_devices_for_each_target() -> None:
    t4 = [LocalDevice("cuda:0", "t4", "Tesla T4", "t", ("sm_75",)) for _ in range(3)]
    rtx = LocalDevice("cuda:0", "rtx8000", "Quadro RTX 8000", "r", ("sm_75",))
    h200 = LocalDevice("cuda:0", "h200", "NVIDIA H200", "h", ("sm_90a", "sm_75", "sm_80"), ("sm_75", "sm_80"), "sm_90")
    found = places_of(("sm_75", "sm_80", "cpu-avx2"), (*t4, rtx, h200))
    on_turing = (Place("sm_75", "t", "t4"), Place("sm_75", "r", "rtx8000"))
    assert found == (*on_turing, Place("sm_80", "h", "h200", "sm_90"), Place("cpu-avx2"))


def test_one_program_on_two_kinds_of_devices_is_two_attempts() -> None:
    spec = AttentionSpec(1, 1, 8, 8, 1, 4, 4)
    job = Job("0" * 64, spec, "sm_75", "program")
    on_t4, on_rtx = Place("sm_75", "t", "t4").put(job), Place("sm_75", "r", "rtx8000").put(job)
    assert on_t4.key != on_rtx.key and on_t4.device_key == "t"
    assert Place("sm_75", "t", "t4").put(job) == on_t4


def test_wishes_of_this_machine() -> None:
    cpu = LocalDevice("cpu", "cpu", "a CPU", "c", ("cpu-avx2",))
    h200 = LocalDevice("cuda:1", "h200", "NVIDIA H200", "a", ("sm_90a", "sm_75", "sm_80"), ("sm_75", "sm_80"), "sm_90")
    wishes = local_wishes(("sm_80",), (cpu, h200, h200))
    assert [w.device for w in wishes] == ["cuda:0", "cuda:0"], "in its actor, the GPU that Ray gave is number 0"
    assert dict(wishes[0].options) == {"num_gpus": 1, "num_cpus": 1}


def node(name: str, alive: bool = True, **resources: float) -> dict:
    return {"NodeID": name, "Alive": alive, "Resources": resources}


def test_wishes_of_a_cluster() -> None:
    nodes = [
        node("head", CPU=4, class_head=1),
        node("cpu", CPU=16, class_cpu=1),
        node("a", CPU=96, GPU=2, class_a100=2),
        node("t", CPU=4, GPU=1, class_t4=1),
        node("gone", alive=False, CPU=4, GPU=1, class_t4=1),
        node("odd", CPU=4, GPU=1, class_v100=1),
    ]
    wishes = node_wishes(("sm_75", "cpu-avx512"), nodes)
    assert [(w.node_id, w.device, w.expected_class) for w in wishes] == [
        ("cpu", "cpu", "cpu"), ("a", "cuda:0", "a100"), ("a", "cuda:0", "a100"), ("t", "cuda:0", "t4"),
    ]  # fmt: skip
    assert dict(wishes[0].options) == {"num_cpus": 16, "resources": {"class_cpu": 1}}, "no builder beside a measurement"
    assert dict(wishes[1].options) == {"num_cpus": 1, "num_gpus": 1, "resources": {"class_a100": 1}}
    assert builder_rooms(nodes) == {"head": 4, "a": 96, "t": 4, "odd": 4}
    assert builder_rooms(nodes, wishes) == {"head": 4, "a": 94, "t": 3, "odd": 4}, "a device's actor holds a CPU"


def test_a_processor_that_is_a_device_lends_its_cpus_where_nobody_else_has_any() -> None:
    """A cluster of one machine: builders and measurements take turns there. GPUs beside it always get the CPU that they need."""
    lone = [node("a", CPU=8, GPU=2, class_cpu=1, class_t4=2)]
    wishes = node_wishes(("sm_75", "cpu-avx512"), lone)
    assert [(w.expected_class, dict(w.options)["num_cpus"]) for w in wishes] == [("cpu", 0), ("t4", 1), ("t4", 1)]
    assert builder_rooms(lone, wishes) == {"a": 6} and builder_rooms(lone) == {"a": 8}
    joined = [*lone, node("b", CPU=4)]
    assert builder_rooms(joined, wishes) == {"b": 4}, "from now on nobody compiles beside a measurement"
    apart = node_wishes(("sm_75", "cpu-avx512"), joined)
    assert [(w.expected_class, dict(w.options)["num_cpus"]) for w in apart] == [("cpu", 6), ("t4", 1), ("t4", 1)]
    assert builder_rooms(lone, apart) == {}, "b left: the actor that was opened beside it holds all"


def test_a_node_that_is_not_what_its_resources_say_is_refused(tmp_path: Path) -> None:
    found, problems = stages.inspect_device("cpu", Shop(str(tmp_path), str(tmp_path)), "a100")
    assert found.device_class == "cpu" and "the node's resources say a100" in problems[0]
