"""CUDA targets without a GPU: what is built ends unverified; what is built for a newer card says so."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from catalog import store
from farm import rows, stages
from farm.devices import device_for
from farm.executors import run_stages
from farm.gpu_tools import sanitized
from farm.jobs import Built, Job, Shop
from generator.authors.rules import RuleAuthor
from generator.canonical import digest_text
from generator.spec import AttentionSpec, Rule
from generator.tl.fill import fill, hole_choices
from generator.tl.printer import print_program
from verifier.records import Measurement, Timing

SPEC = AttentionSpec(2, 1, 64, 64, 1, 128, 128, "fp16", masks=(Rule.make("causal"),), name="small")
needs_nvrtc = pytest.mark.skipif(find_spec("cuda") is None, reason="no CUDA compiler")


@pytest.fixture
def shop(tmp_path) -> Shop:
    store.open(tmp_path / "catalog", create=True)
    return Shop(str(tmp_path / "catalog"), str(tmp_path / "cache"), sweep_id="test")


def job(target: str, **changes) -> Job:
    code = RuleAuthor().code(SPEC, target)
    program = print_program(fill(code, next(hole_choices(code))))
    return replace(Job(digest_text(target), SPEC, target, program, measure_s=0.2), **changes)


@needs_nvrtc
@pytest.mark.skipif(device_for("sm_80") is not None, reason="a GPU is here")
def test_without_a_gpu_a_cubin_is_kept_unverified(shop: Shop) -> None:
    row = run_stages(job("sm_80"), shop)
    assert (row["reason_code"], row["status"], row["target"], row["isa"]) == (
        "compiled_unverified",
        "unverified",
        "sm_80",
        ["sm_80"],
    )
    assert row["device_key"] is None and row["verified_on"] is None and row["registers"] > 0
    assert store.open(shop.catalog).artifacts.get(row["binary_hash"])[:4] == b"\x7fELF"


@needs_nvrtc
def test_source_for_an_older_card_is_built_for_the_card_that_checks_it(shop: Shop) -> None:
    built = stages.build(job("sm_80", arch="sm_90"), shop)
    assert isinstance(built, Built) and built.binary.target == "sm_80" and "-arch=sm_90" in built.binary.flags
    assert built.columns["isa"] == ["sm_90"] and built.launch.target_facts["isa"] == "sm_80"
    said = rows.of_borrowed(built.binary, "sm_80", "NVIDIA H200")
    assert said == {"verified_on": "NVIDIA H200, compiled for sm_90"}
    assert rows.of_borrowed(built.binary, "sm_90", "NVIDIA H200") == {}


def test_the_devices_conditions_stand_in_the_row() -> None:
    moment = {"sm_mhz": 1980, "memory_mhz": 3201, "power_w": 612.3, "temperature_c": 44, "reasons": ("power cap",)}
    gpu = {"before": moment, "after": moment | {"sm_mhz": 1755}, "reasons": ["power cap"], "clock_lock": "not locked"}
    ours = Timing("ours", (1e-3,), 1e-3, 1e-3, 1e-3)
    measured = Measurement("m", ours, (), {}, "", 0.0, 0.0, 0.0, 1e-4, 1.1, 0, {"gpu": gpu, "l2": "cold"})
    columns = rows.of_measurement(measured)
    assert (columns["sm_clock_before_mhz"], columns["sm_clock_after_mhz"], columns["l2_state"]) == (1980.0, 1755.0, "cold")
    assert columns["throttle_flags"] == ["power cap"] and columns["temperature_c"] == 44.0


def test_what_the_sanitizer_says_stands_in_the_row(shop: Shop, monkeypatch) -> None:
    from verifier import cuda_sanitize
    from verifier.records import Failed, Witness

    built = Built(job("sm_80"), None, None, {})
    said: list = [cuda_sanitize.Clean("memcheck: clean (6 inputs)", True)]
    monkeypatch.setattr(cuda_sanitize, "sanitize", lambda *a: said[-1])
    columns: dict = {}
    assert sanitized(None, built, "cuda:0", columns) is None
    assert 0 <= columns.pop("gpu_s") < 1 and columns == {"sanitizer": "memcheck: clean (6 inputs)"}
    said.append(Failed("out_of_bounds", Witness("compute-sanitizer memcheck", "memcheck: Invalid __global__ write")))
    assert sanitized(None, built, "cuda:0", columns) is said[-1]
    assert columns["sanitizer"] == said[-1].witness.message and columns["witness_check"] == "compute-sanitizer memcheck"
    assert sanitized(None, built, "cpu", columns) is None and "CUDA kernels" in columns["sanitizer"]


@needs_nvrtc
def test_seconds_of_a_gpu_are_told_and_a_verdict_is_paid_for_once(shop: Shop, monkeypatch) -> None:
    """The later rung of a search has the verdict of the first for nothing; an attempt that is asked again keeps its own."""
    from verifier.records import Failed, Passed, Witness

    built = stages.build(job("sm_80", columns={"author": "rules"}), shop)
    assert isinstance(built, Built), built
    later = replace(built, job=replace(built.job, key=digest_text("later")))
    found = Failed("throttled", Witness("device", "hot"), again_s=0.5)
    monkeypatch.setattr(stages, "judge", lambda *a, **k: Passed("stand-in", (), (), 1, 2.0))
    monkeypatch.setattr(stages, "_measured", lambda *a: found)
    monkeypatch.setattr(stages, "strangers_on", lambda device: {})
    monkeypatch.setattr(stages, "slot_of", lambda device: "gpu-of-a-test")
    monkeypatch.setattr(stages.rows, "device_columns", lambda device: {"device_name": "a card"})
    first, again, other = (stages.prove(b, shop, "cuda:0") for b in (built, built, later))
    assert [row["verify_s"] for row in (first, again, other)] == [2.0, 2.0, 0.0]
    for row in (first, again, other):
        assert row["again_s"] == 0.5 and row["gpu_s"] == pytest.approx(row["verify_s"] + row["measure_s"] + 0.5)


def test_a_missing_sanitizer_is_told_before_the_sweep_and_in_rows(shop: Shop, monkeypatch) -> None:
    from farm import sweep
    from farm.console import InputError
    from farm.devices import LocalDevice
    from verifier import cuda_sanitize

    def missing(*_):
        raise cuda_sanitize.NoSanitizer(f"compute-sanitizer was not found: {cuda_sanitize.CURE}")

    monkeypatch.setattr(cuda_sanitize, "find_sanitizer", missing)
    columns: dict = {}
    monkeypatch.setattr(cuda_sanitize, "sanitize", missing)
    assert sanitized(None, Built(job("sm_80"), None, None, {}), "cuda:0", columns) is None
    assert columns["sanitizer"].startswith("not run: compute-sanitizer was not found: install")
    sweep.check_sanitizer(("sm_80",))  # no GPU here: nothing to look at
    monkeypatch.setattr(sweep, "devices_here", lambda: (LocalDevice("cuda:0", "h200", "H200", "k", ("sm_80",)),))
    with pytest.raises(InputError, match="--sanitize: compute-sanitizer was not found"):
        sweep.check_sanitizer(("sm_80",))
    sweep.check_sanitizer(("cpu",))
