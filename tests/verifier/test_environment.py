"""The device key tells machines apart by what matters, and the provenance is plain data."""

import json
from dataclasses import replace

import pytest

from verifier import environment, gpu
from verifier.compile import ISA_FLAGS
from verifier.environment import DeviceKey, NoDevice, cores_given, device_key, isa_levels


def test_the_cpu_key_is_stable_and_full():
    key = device_key()
    assert key == device_key() and key.kind == "cpu" and key.hash == device_key("cpu").hash
    assert {"isa", "cores", "cache_l1d", "cache_l2", "cache_l3"} == {name for name, _ in key.facts}
    assert key["cores"] == cores_given() >= 1


def test_any_change_of_a_fact_makes_another_key():
    key = device_key()
    for name, value in key.facts:
        changed = tuple((n, (v + 1 if isinstance(v, int) else v + " more") if n == name else v) for n, v in key.facts)
        assert replace(key, facts=changed).hash != key.hash, (name, value)
    assert replace(key, name="another").hash != key.hash


def test_cores_follow_affinity_and_quota(monkeypatch):
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(environment, "_cgroup_quota", lambda: 2.5)
    assert cores_given() == 3
    monkeypatch.setattr(environment, "_cgroup_quota", lambda: 0.0)
    assert cores_given() == 8


def test_levels_go_from_wide_to_narrow_and_the_compiler_knows_each():
    assert isa_levels()[-1] == "baseline" and set(isa_levels()) <= set(ISA_FLAGS)
    assert set(environment.ISA_NEEDS) == set(ISA_FLAGS)


def test_provenance_is_plain_json():
    facts = environment.environment()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["torch"] and facts["compiler"] and facts["created_at"].endswith("+00:00")


def test_a_gpu_that_is_not_there_is_said_so():
    try:
        key = device_key("cuda:0")
    except NoDevice as error:
        assert str(error).startswith("device: 'cuda:0'")
    else:
        assert isinstance(key, DeviceKey) and key.kind == "cuda" and key["compute_capability"]


def test_gpu_numbers_are_looked_up_in_the_visible_list(monkeypatch):
    class Nvml:
        nvmlDeviceGetHandleByIndex = staticmethod(lambda n: f"index {n}")
        nvmlDeviceGetHandleByUUID = staticmethod(lambda u: f"uuid {u}")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-abc")
    assert gpu.gpu_handle(Nvml, "cuda:0") == "index 3"
    assert gpu.gpu_handle(Nvml, "cuda:1") == "uuid GPU-abc"
    with pytest.raises(NoDevice, match="cuda:2"):
        gpu.gpu_handle(Nvml, "cuda:2")


def test_one_thread_for_each_core_and_not_for_each_of_its_halves(monkeypatch):
    import torch

    assert environment.worker_threads() == environment.cores_given() or environment.worker_threads() == torch.get_num_threads()
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(environment, "_cgroup_quota", lambda: 0.0)
    monkeypatch.setattr(
        environment, "_first_line", lambda path: str(int(path.split("/cpu")[-1].split("/")[0]) // 2) if "core_id" in path else "0"
    )
    assert environment.worker_threads() == 4
    monkeypatch.setattr(environment, "_cgroup_quota", lambda: 2.0)
    assert environment.worker_threads() == 2
