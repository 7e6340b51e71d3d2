"""One attempt from spec to row on a small real problem, and a row for every way out."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from catalog import store
from farm import stages
from farm.jobs import Built, Job, Shop
from farm.quiet import StillBusy, measuring
from farm.rules import forms_here
from generator.authors.rules import RuleAuthor
from generator.canonical import digest_text
from generator.spec import AttentionSpec, Rule
from generator.tl.fill import fill, hole_choices
from generator.tl.printer import print_program
from verifier.records import Failed, Passed, Witness

SPEC = AttentionSpec(4, 2, 32, 32, 1, 70, 70, masks=(Rule.make("causal", align="bottom_right"),), name="small")
TARGET = forms_here()[0] if forms_here() else "cpu-avx2"
pytestmark = [pytest.mark.skipif(not forms_here(), reason="no AVX2 here"), pytest.mark.usefixtures("any_pace")]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    folder = tmp_path_factory.mktemp("stages")
    store.open(folder / "catalog", create=True)
    return Shop(str(folder / "catalog"), str(folder / "cache"), sweep_id="test")


def job(**changes: Any) -> Job:
    code = RuleAuthor().code(SPEC, TARGET)
    holes = next(hole_choices(code))
    program = print_program(fill(code, holes))
    texts = {"code": print_program(code)}
    made = Job(digest_text("job"), SPEC, TARGET, program, measure_s=0.2, texts=texts, columns={"tuning": holes})
    return dataclasses.replace(made, **changes)


@pytest.fixture(scope="module")
def built(shop: Shop) -> Built:
    result = stages.build(job(), shop)
    assert isinstance(result, Built), result
    return result


def proven(built: Built, shop: Shop) -> dict[str, Any]:
    """The row, however long others keep the device."""
    return stages.prove(built, dataclasses.replace(shop, slot_wait_s=600.0))


def test_a_right_kernel_is_a_row_with_verdict_time_and_artifacts(shop: Shop, built: Built) -> None:
    row = proven(built, shop)
    assert row["reason_code"] == "ok", row["message"]
    assert row["target"] == "cpu" and row["isa"] == [TARGET.removeprefix("cpu-")] and row["p50_s"] > 0 and row["ratio_p50"] > 0
    assert row["baseline_name"].startswith("torch") and row["device_key"] and len(row["verified_shapes"]) > 3
    assert json.loads(row["tuning"]) == built.job.columns["tuning"]
    kept = store.open(shop.catalog).artifacts
    for name in ("program_hash", "tl_hash", "source_hash", "binary_hash"):
        assert kept.get(row[name]), name
    assert kept.text(row["program_hash"]) == built.job.program


def test_a_binary_of_the_cache_costs_its_attempt_no_compiling(shop: Shop, built: Built) -> None:
    again = stages.build(job(), shop)
    assert isinstance(again, Built) and again.binary.cached and again.binary == built.binary
    assert again.columns["compile_s"] == 0.0
    assert again.columns["resources"]["compiled_before_in_s"] == built.binary.compile_s > 0
    assert built.binary.cached or built.columns["compile_s"] == built.binary.compile_s


def test_waiting_for_others_is_no_time_of_measuring(shop: Shop, built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Failed("throttled", Witness("stand-in", "no measurement here"))
    monkeypatch.setattr(stages, "measure", lambda *a, **k: found)
    monkeypatch.setattr(stages, "_judged", lambda *a: Passed("stand-in", (), (), 1, 0.0))
    slot = f"test-{os.getpid()}"
    monkeypatch.setattr(stages, "slot_of", lambda device: slot)
    holder = threading.Thread(target=hold, args=(slot, 0.5, started := threading.Event()))
    holder.start()
    started.wait()
    with pytest.raises(StillBusy, match=f"process {os.getpid()} measures"):
        stages.prove(built, dataclasses.replace(shop, slot_wait_s=0.05))
    row = stages.prove(dataclasses.replace(built, columns=built.columns | {"queue_s": 10.0}), shop)
    holder.join()
    assert row["reason_code"] == "throttled" and row["measure_s"] < 0.2 and row["queue_s"] >= 10.0


def hold(slot: str, seconds: float, started: threading.Event) -> None:
    with measuring(slot):
        started.set()
        time.sleep(seconds)


def test_a_plan_says_beside_whom_a_kernel_is_timed(shop: Shop, built: Built) -> None:
    row = proven(dataclasses.replace(built, job=dataclasses.replace(built.job, rivals=("torch-eager",))), shop)
    rivals = json.loads(row["rivals"])
    assert row["baseline_name"] == "torch eager" and set(rivals["measured"]) | set(rivals["unsupported"]) == {"torch eager"}
    row = proven(dataclasses.replace(built, job=dataclasses.replace(built.job, rivals=())), shop)
    assert row["p50_s"] > 0 and row["baseline_name"] is None and json.loads(row["rivals"])["measured"] == {}


@pytest.mark.parametrize(
    ("change", "reason", "message"),
    [
        (lambda p: p.replace("Compute GEMM Q, K^T and get S", "Compute GEMM Q, Kay^T and get S"), "tl_rejected", "Kay"),
        (lambda p: "", "author_failed", "no rules for it"),
    ],
)
def test_what_cannot_be_built_is_a_row(shop: Shop, change: Any, reason: str, message: str) -> None:
    program = change(job().program)
    trouble = None if program else ("author_failed", "no rules for it")
    row = stages.build(job(program=program, trouble=trouble), shop)
    assert isinstance(row, dict) and row["reason_code"] == reason and message in row["message"]


def test_a_wrong_program_is_a_row_with_a_witness(shop: Shop) -> None:
    wrong = job().program.replace("rowsum(P)", "rowmax(P)")
    assert wrong != job().program
    row = stages.run_attempt(job(program=wrong, key=digest_text("wrong")), shop)
    assert row["reason_code"] == "wrong_value" and row["witness_check"] and row["witness_input"] and row["p50_s"] is None


def test_a_binary_that_changed_on_its_way_is_not_judged(shop: Shop, built: Built, tmp_path: Path) -> None:
    other = tmp_path / "other.so"
    other.write_bytes(Path(built.binary.path).read_bytes() + b"x")
    changed = dataclasses.replace(built, binary=dataclasses.replace(built.binary, path=str(other)))
    with pytest.raises(ValueError, match="is not what was built"):
        stages.prove(changed, shop)


def test_a_binary_is_fetched_from_the_catalog_where_it_was_not_built(shop: Shop, built: Built, tmp_path: Path) -> None:
    gone = dataclasses.replace(built, binary=dataclasses.replace(built.binary, path=str(tmp_path / "gone.so")))
    row = proven(gone, dataclasses.replace(shop, cache=str(tmp_path)))
    assert row["reason_code"] == "ok"


def test_a_target_without_a_device_keeps_its_binary(shop: Shop, built: Built) -> None:
    row = stages.row_unproven(built, "compiled_unverified", "no device here can run this target")
    assert (row["status"], row["binary_hash"]) == ("unverified", built.binary.hash)


def test_lost_jobs_are_rows() -> None:
    row = stages.row_without_verdict(job(), "lost_node", "builder was lost")
    assert row["status"] == "not_run" and row["spec_name"] == "small"


def test_versions_follow_the_code() -> None:
    translator, harness = stages.versions()
    assert translator != harness and "+" in translator
    assert any(TARGET in device.targets for device in stages.devices())
