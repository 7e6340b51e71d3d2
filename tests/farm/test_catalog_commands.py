"""`farm catalog ...` on real catalogs: tables, JSON, exit codes, and one line for bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import catalog
from farm.cli import app
from farm.console import guard

sys.path.append(str(Path(__file__).parents[1] / "catalog"))
from catalog_rows import SPEC, attempt, sha, verified  # noqa: E402


@pytest.fixture
def farm(monkeypatch, capsys, tmp_path):
    """Runs a command in this process; gives exit code, standard output and standard error."""
    monkeypatch.setenv("FARM_CATALOG", str(tmp_path / "catalog"))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["farm", "catalog", *map(str, args)])
        code = guard(app)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def held(tmp_path):
    cat = catalog.open(tmp_path / "catalog", create=True)
    with cat.writer("r1") as writer:
        names = {n: cat.artifacts.put(f"{n} text") for n in ("program_hash", "source_hash", "binary_hash", "log_hash")}
        columns = {"baseline_name": "torch", "ratio_p50": 1.5, "device_name": "a CPU", "cases": [("random", 1, 2, 3, 4, 5, 6)]}
        writer.append(verified(1, 1e-3, **names, **columns))
        writer.append(verified(2, 2e-3, **names, throttle_flags=["hot"]))
        writer.append(attempt(3, "lost_node"))
        writer.append(attempt(3, "wrong_value", attempt_no=2, message="off by 3"))
    return cat


def id_of(held, key):
    return held.rows(["row_id"], {"attempt_key": sha(f"attempt {key}")})["row_id"][0].as_py()


def test_what_the_compiler_warned_of_is_a_warning_of_show(farm, held):
    with held.writer("r2") as writer:
        warned = {"warnings": ["148 bytes of registers spilled: choose smaller tiles", "no HGMMA instruction"], "registers": 255}
        writer.append(verified(7, 1e-3, resources=warned))
        writer.append(verified(8, 1e-3, resources={"registers": 128, "warnings": []}))
    out = farm("show", id_of(held, 7))[1]
    assert "\nwarning: 148 bytes of registers spilled" in out and "\nwarning: no HGMMA instruction\n" in out
    assert "no HGMMA instruction" in json.loads(farm("show", id_of(held, 7), "--json")[1])["warnings"]
    assert "spilled" not in farm("show", id_of(held, 8))[1]


def test_list(farm, held):
    code, out, _ = farm("list")
    assert code == 0 and len(out.splitlines()) == 4 and "row" in out.splitlines()[0]
    assert f"{id_of(held, 1)[:8]}  ok" in out and "1x8/2 512x512 d64 fp32 causal(alignment=top_left)" in out and "1.500x" in out
    code, out, _ = farm("list", "--json", "--where", "status = 'failed'", "--columns", "row_id,message")
    assert json.loads(out) == [{"row_id": id_of(held, 3), "message": "off by 3"}]
    assert len(json.loads(farm("list", "--json", "--all-attempts")[1])) == 4
    code, out, _ = farm("list", "--limit", "1")
    assert "2 more; --limit 0 shows all" in out and len(out.splitlines()) == 3
    assert farm("list", "--where", "status = 'unverified'")[1] == "no rows\n"


def test_show_prints_everything(farm, held):
    code, out, _ = farm("show", id_of(held, 1)[:10])
    assert code == 0
    for expected in (
        "p50_s                    0.001", "3 samples from 0.00099 to 0.00101", "1 x 512 x 512, 1 x 257 x 257",
        "rms 1 of 5 allowed",
        str(held.artifacts.local_path(sha("binary_hash text"))), "\nlineage\n", "sequence                 1",
    ):  # fmt: skip
        assert expected in out
    row = json.loads(farm("show", id_of(held, 1), "--json")[1])
    assert row["p50_s"] == 1e-3 and row["warnings"] == [] and set(row["artifacts"]) >= {"binary_hash", "log_hash"}
    assert farm("show", id_of(held, 1), "--print", "log")[1] == "log_hash text"
    code, _, err = farm("show", id_of(held, 1), "--print", "poem")
    assert code == 2 and "expected one of program, source, log, found 'poem'" in err


def test_show_warns(farm, held):
    assert "warning: the device was throttled while it was timed: hot" in farm("show", id_of(held, 2))[1]
    lost = held.rows(["row_id"], "reason_code = 'lost_node'", history=True)["row_id"][0].as_py()
    assert "warning: superseded" in farm("show", lost)[1] and "program: the artifact is missing" in farm("show", lost)[1]
    farm("revoke", id_of(held, 1), "--reason", "odd lengths")
    assert "odd lengths" in farm("show", id_of(held, 1))[1]


def test_best_and_sql(farm, held):
    code, out, _ = farm("best")
    assert code == 0 and id_of(held, 1)[:8] in out and "the fastest" in out and len(out.splitlines()) == 2
    (chosen,) = json.loads(farm("best", "--json", "--device", chosen_device(held)[:6])[1])
    assert chosen["row_id"] == id_of(held, 1) and json.loads(farm("best", "--json", "--device", "ffff")[1]) == []
    code, out, _ = farm("sql", "select status, count(*) as n from rows group by all order by 1")
    assert out.split() == ["status", "n", "failed", "1", "ok", "2"]
    assert json.loads(farm("sql", "select count(*) as n from attempts", "--json")[1]) == [{"n": 4}]


def chosen_device(held):
    return held.best(SPEC)["device_key"]


def test_diff_fails_over_a_limit(farm, held, tmp_path):
    slower = catalog.open(tmp_path / "slower", create=True)
    with slower.writer("r1") as writer:
        writer.append(verified(1, 1.1e-3))
    code, out, err = farm("diff", held.uri, slower.uri, "--fail-over", "5%")
    assert code == 1 and "+10.0%" in out and "1 of 1 got slower by more than 5%" in err
    assert (
        farm("diff", held.uri, slower.uri, "--fail-over", "20%")[0] == 0
        and farm("diff", slower.uri, held.uri, "--fail-over", "0")[0] == 0
    )
    assert json.loads(farm("diff", held.uri, slower.uri, "--json")[1])[0]["verdict"] == "slower"


def test_upkeep(farm, held, tmp_path):
    assert farm("compact")[1].startswith("1 parts became 2: 3 rows rewritten, 1 superseded ones moved to history")
    code, out, _ = farm("verify", "--no-artifacts")
    assert (code, out.splitlines()[-1]) == (0, "clean: 2 parts, 3 rows, 0 journals, 0 artifacts")
    lost = held.artifacts.put("nobody's")
    assert farm("gc", "--grace-hours", "0", "--dry-run")[1].startswith("would delete 1 artifacts and 0 leftover files")
    assert json.loads(farm("gc", "--grace-hours", "0", "--json")[1])["artifacts"] == [lost]
    catalog.open(tmp_path / "other", create=True)
    assert farm("merge", held.uri, "-c", tmp_path / "other")[1] == "copied 4 rows, 4 artifacts, 0 revocations, 0 transcripts\n"
    code, out, _ = farm("export", tmp_path / "x.csv", "--where", "status = 'ok'", "--artifacts", tmp_path / "files")
    assert out == f"{tmp_path / 'x.csv'}: 2 rows, 4 artifacts\n" and (tmp_path / "x.csv").exists()
    stale = json.loads(farm("verify", "--stale", "--json")[1])
    assert {row["row_id"] for row in stale} == {id_of(held, 1), id_of(held, 2)}


def test_lock(farm, held, tmp_path):
    path = tmp_path / "farm.lock"
    code, out, _ = farm("lock", "-o", path, "--diff")
    assert code == 1 and f"none -> {id_of(held, 1)[:8]}" in out and not path.exists()
    assert farm("lock", "-o", path)[0] == 0 and json.loads(path.read_text())["pinned"][0]["row_id"] == id_of(held, 1)
    assert farm("lock", "-o", path, "--diff")[:2] == (0, "1 choices, 0 changed\n")
    farm("revoke", "--binary", sha("binary_hash text"), "--reason", "bad")
    code, out, err = farm("lock", "-o", path, "--diff")
    assert code == 1 and "-> none" in out and "revoked: bad" in err


def test_damage_is_told_and_can_be_set_aside(farm, held):
    with held.writer("r2") as writer:
        writer.append(attempt("later"))
    part = next((held.location.local / "rows").glob("r1*"))
    part.write_bytes(part.read_bytes()[:-3])
    code, _, err = farm("list")
    assert code == 2 and part.name in err and len(err.splitlines()) == 1
    code, out, err = farm("list", "--skip-damaged", "--json")
    assert code == 0 and len(json.loads(out)) == 1 and f"left out: {part}" in err
    code, out, _ = farm("verify")
    assert code == 1 and "WRONG" in out and out.splitlines()[-1].startswith("1 errors")
    code, out, _ = farm("verify", "--drop-damaged", "--no-artifacts")
    assert code == 0 and f"set aside: {part.name}" in out
    assert len(json.loads(farm("list", "--json")[1])) == 1


def test_a_stranger_among_the_records_of_runs_is_one_finding_of_many(farm, held):
    lost = held.location.local / "artifacts" / sha("log_hash text")[:2]
    next(lost.rglob(sha("log_hash text"))).write_text("other bytes")
    (held.location.local / "runs").mkdir(exist_ok=True)
    (held.location.local / "runs" / "stranger.json").write_bytes(bytes(range(256)))
    code, out, _ = farm("verify")
    assert code == 1 and "stranger.json: damaged" in out and "(the sums of no run were checked)" in out
    assert sha("log_hash text") in out, "what else is wrong is told, too"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("list", "--where", "p50 < 1"), "p50: no such column; did you mean p50_s?"),
        (("list", "--columns", "nope"), "nope: no such column"),
        (("show", "zzz"), "row id: expected hex digits, found 'zzz'"),
        (("show", "abcdefabcdef"), "no row begins with 'abcdefabcdef'"),
        (("sql", "selec"), "sql: Parser Error"),
        (("sql", "select model from rows"), 'Candidate bindings: "'),
        (("sql", "select model from rows"), "docs/catalog.md tells the columns (tables show spec_name as model"),
        (("diff", "nowhere", "nowhere"), "there is no catalog at"),
        (("diff", "nowhere", "nowhere", "--fail-over", "some"), "--fail-over: expected a share"),
        (("export", "x.xlsx"), "format: expected one of csv"),
        (("compact", "--rows-per-part", "0"), "Invalid value for '--rows-per-part'"),
        (("revoke", "--reason", "x"), "revoke: expected a row id or --binary"),
        (("list", "-c", "bogus://x/y"), "catalog: cannot use 'bogus://x/y'"),
        (("list", "--columns", ",,"), "--columns: expected names such as row_id,p50_s, found ',,'"),
        (("export", "x.csv", "--columns", ""), "--columns: expected a value, found an empty text"),
        (("list", "--limit", str(10**30)), "Invalid value for '--limit'"),
        (("list", "--where", "(" * 5000), "filter: expected parentheses and 'not' at most 100 deep, found more"),
        (("list", "--where", "not " * 5000), "filter: expected parentheses and 'not' at most 100 deep, found more"),
        (("sql", "select * from range(100000000000)"), "sql: expected an answer of at most 50 rows, found more; add a limit"),
        (("export", "none/x.csv"), "PATH: none/x.csv: cannot be written: no such folder; mkdir -p none"),
        (("export", "/proc/x.csv"), "/proc/x.csv: writing failed: No such file or directory"),
        (("export", "."), "PATH: expected the name of a file, found '.'"),
        (("export", "x.csv", "--artifacts", "/proc/x"), ": writing failed: No such file or directory"),
        (("lock", "-o", "none/farm.lock"), "--output: none/farm.lock: cannot be written: no such folder; mkdir -p none"),
        (("lock", "-o", "/proc/farm.lock"), "/proc/farm.lock: writing failed: No such file or directory"),
        (("lock", "-o", "/dev/zero"), "/dev/zero: cannot be read (File too large)"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(farm, held, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("catalog.query.MOST_ROWS", 50)
    before = sorted(tmp_path.rglob("*"))
    code, _, err = farm(*args)
    assert code == 2 and message in err and len(err.splitlines()) == 1, err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_location_without_a_catalog_stays_as_it_is(farm, tmp_path):
    for command in (("list",), ("verify",), ("compact",), ("gc",), ("best",), ("lock", "-o", tmp_path / "l")):
        code, _, err = farm(*command)
        assert code == 2 and "there is no catalog at" in err and not list(tmp_path.iterdir())
