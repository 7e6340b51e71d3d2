"""Which device judges which target; classes of cards by their names; GPUs that are not here are told by facts."""

from __future__ import annotations

import pytest

from farm import devices
from farm.devices import LocalDevice, class_of, targets_of


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


def test_on_ray_older_targets_are_compiled_for_the_card_that_checks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from farm import ray_executor

    h200 = LocalDevice("cuda:1", "h200", "NVIDIA H200", "a", ("sm_90a", "sm_75", "sm_80"), ("sm_75", "sm_80"), "sm_90")
    monkeypatch.setattr(ray_executor, "devices_here", lambda: (h200, h200))
    wishes = ray_executor.local_wishes(("sm_80", "cpu-avx2"))
    assert [w.device for w in wishes] == ["cuda:0", "cuda:0"], "in its actor, the GPU that Ray gave is number 0"
    assert dict(wishes[0].archs) == {"sm_75": "sm_90", "sm_80": "sm_90"} and dict(wishes[0].options)["num_gpus"] == 1
    assert ray_executor.local_wishes(("cpu-avx2",)) == ()
