"""`farm explain` and `farm reproduce` on a catalog with one real kernel; `farm catalog verify --again` on older rows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import catalog
from catalog import store
from catalog.schema import make_row
from farm import stages
from farm.cli import app
from farm.jobs import Job, Shop
from farm.rules import forms_here
from generator.authors.rules import RuleAuthor
from generator.canonical import digest_text
from generator.spec import AttentionSpec, Rule
from generator.tl.fill import fill, hole_choices
from generator.tl.printer import print_program

SPEC = AttentionSpec(2, 1, 32, 32, 1, 90, 90, masks=(Rule.make("causal", align="bottom_right"),), name="small")
pytestmark = pytest.mark.skipif(not forms_here(), reason="no AVX2 here")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, any_pace: None) -> tuple[str, dict[str, Any]]:
    """A catalog with one verified row, and one that failed before it was built."""
    folder = tmp_path_factory.mktemp("rows")
    opened = store.open(folder / "c", create=True)
    code = RuleAuthor().code(SPEC, forms_here()[0])
    program = print_program(fill(code, next(hole_choices(code))))
    shop = Shop(opened.uri, str(folder / "cache"))
    job = Job(digest_text("job"), SPEC, forms_here()[0], program, measure_s=0.2, columns={"author": "rules"})
    row = stages.run_attempt(job, shop)
    nothing = stages.row_without_verdict(
        dataclasses.replace(job, key=digest_text("none"), program=""), "author_failed", "no idea"
    )
    with opened.writer("run") as writer:
        row_id = writer.append(row)
        writer.append(nothing)
    return opened.uri, row | {"row_id": row_id}


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("FARM_CACHE", str(tmp_path / "cache"))
    yield
    catalog.configure(catalog=None)


def farm(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))


def test_a_row_is_made_again_from_its_artifacts(made: tuple[str, dict[str, Any]]) -> None:
    uri, row = made
    assert row["reason_code"] == "ok", row["message"]
    before = {path: path.stat().st_mtime_ns for path in Path(uri).rglob("*")}  # those of folders tell of files that came and went
    done = farm("reproduce", row["row_id"][:10], "--catalog", uri, "--seconds", "0.2", "--json")
    result = json.loads(done.stdout)
    assert result["same_binary"] is True and result["same_verdict"] and done.exit_code == 0
    after = {path: path.stat().st_mtime_ns for path in Path(uri).rglob("*")}
    assert after == before, "without --record the catalog is only read: it may be one that nobody here can write"


def test_a_row_without_a_program_cannot_be_made_again(made: tuple[str, dict[str, Any]]) -> None:
    uri, _ = made
    (failed,) = store.open(uri).query({"reason_code": "author_failed"})
    done = farm("reproduce", failed["row_id"], "--catalog", uri)
    assert "nothing can be run" in str(done.exception)


def test_explain_shows_the_kernel_and_why_others_were_turned_down(made: tuple[str, dict[str, Any]]) -> None:
    uri, row = made
    done = farm("explain", "1x2/1x90", "--dim", "32", "--causal", "--catalog", uri)
    assert row["row_id"][:8] in done.stdout or row["binary_hash"][:8] in done.stdout
    other = farm("explain", "1x2/1x90", "--dim", "32", "--catalog", uri, "--json")
    assert other.exit_code == 1 and json.loads(other.stdout)["kernel_id"] is None


def test_a_wrong_file_of_rules_is_named_before_anything_is_made(
    made: tuple[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARM_CACHE", str(tmp_path / "cache"))
    done = farm("reproduce", made[1]["row_id"], "--catalog", made[0], "--variants", "nowhere.py")
    assert str(done.exception).startswith("--variants: ") and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("1x2",), "CALL: expected BATCHxHEADS"),
        (("1x2x8", "--dim", "x"), "--dim: expected HEAD_DIM"),
        (("1x2x8", "--dtype", "fp8"), "--dtype: expected one of fp32"),
        (("1x2x8", "--window", "3"), "--window: expected LEFT,RIGHT"),
        (("1x2x8", "--function", "f"), "--function: expected"),
    ],
)
def test_bad_questions(made: tuple[str, dict[str, Any]], args: tuple[str, ...], message: str) -> None:
    done = farm("explain", *args, "--catalog", made[0])
    assert str(done.exception).startswith(message)


def test_rows_of_an_older_harness_are_judged_again(made: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    uri, row = made
    old = make_row(
        **{k: v for k, v in row.items() if k not in ("row_id",) and v is not None and k in OLD_COLUMNS}, harness_version="0+old"
    )
    source, copy = store.open(uri), store.open(tmp_path / "c", create=True)
    for name in ("program_hash", "source_hash", "binary_hash"):
        copy.artifacts.put(source.artifacts.get(row[name]))
    with copy.writer("old") as writer:
        writer.append(old)
    done = farm("catalog", "verify", "--again", "--catalog", copy.uri)
    assert "[1/1]" in done.output
    (now,) = (r for r in copy.rows(history=True).to_pylist() if r["attempt_no"] == 2)
    assert now["harness_version"] == stages.versions()[1] and now["parent_row_id"]


OLD_COLUMNS = (
    "attempt_key", "reason_code", "spec", "target", "translator_version", "device_key", "source_hash", "binary_hash", "launch",
    "rule_id", "verified_shapes", "program_hash", "isa", "language", "p50_s",
)  # fmt: skip


def test_what_was_said_of_an_attempt_for_people_and_for_scripts(made: tuple[str, dict[str, Any]]) -> None:
    uri, row = made
    said = json.loads(farm("logs", row["row_id"], "--catalog", uri, "--json").stdout)
    assert said["row_id"] == row["row_id"] and said["reason_code"] == "ok"
    assert Path(said["artifacts"]["source"]).read_text().startswith("// ") and {"program", "binary"} <= set(said["artifacts"])
    lines = farm("logs", row["row_id"], "--catalog", uri).stdout.splitlines()
    assert lines[0].endswith(": ok") and f"source: {said['artifacts']['source']}" in lines
