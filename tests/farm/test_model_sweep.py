"""`farm sweep --author llm` as a process, from request to verified, measured kernel, against a real HTTP server that plays
written answers.
"""

import json
import os
import re
import time

import pytest
from chat_server import ChatServer, failure
from model_runs import PLAN, PROGRAM, SKETCH, answering, fenced, rows, sweep

import catalog
from farm.console import InputError
from farm.model_settings import read_settings
from farm.plan import Budget


def test_from_request_to_verified_kernel_in_twenty_seconds(tmp_path):
    start, key = time.monotonic(), "sk-very-secret-9876543210"
    with ChatServer(answering(PROGRAM)) as server:
        ended = sweep(tmp_path, server, key=key)
    assert ended.returncode == 0, ended.stderr
    assert key not in ended.stdout + ended.stderr
    assert not any(key.encode() in f.read_bytes() for f in tmp_path.rglob("*") if f.is_file())
    [row] = rows(tmp_path)
    assert row["reason_code"] == "ok" and row["p50_s"] > 0
    assert (row["author"], row["author_mode"], row["tokens_in"], row["tokens_out"]) == ("test-model", "llm", 200, 100)
    stored = catalog.open(tmp_path / "catalog").artifacts
    conversation = json.loads(stored.get(row["transcript_hash"]))
    assert [e["answer"]["text"] for e in conversation] == [f"```sketch\n{SKETCH}```", fenced(PROGRAM)]
    assert stored.get(row["sketch_hash"]).decode().startswith("Copy Q")
    assert time.monotonic() - start < 20 or os.getloadavg()[0] > 3


def test_a_second_start_asks_nothing_and_a_replay_ends_in_the_same_rows(tmp_path):
    with ChatServer(answering(PROGRAM.replace("kv <= q", "kv < q"), PROGRAM)) as server:
        assert sweep(tmp_path, server).returncode == 0
        asked = len(server.requests)
        again = sweep(tmp_path, server)
        assert again.returncode == 0 and len(server.requests) == asked
    assert len(rows(tmp_path)) == 2 and json.loads(again.stdout)["known"] == 2
    before = {r["program_hash"]: r["reason_code"] for r in rows(tmp_path)}
    other = tmp_path / "other"
    (other / "catalog").mkdir(parents=True)
    (tmp_path / "catalog" / "transcripts").rename(other / "catalog" / "transcripts")
    ended = sweep(other, None, "--replay", key="")
    assert ended.returncode == 0, ended.stderr
    assert {r["program_hash"]: r["reason_code"] for r in rows(other)} == before


def test_a_token_budget_stops_the_asking_and_what_is_there_stays(tmp_path):
    wrong = PROGRAM.replace("kv <= q", "kv < q")
    with ChatServer(answering(*[wrong] * 10)) as server:
        ended = sweep(tmp_path, server, "--budget-tokens", "300")
        assert len(server.requests) == 2
    assert ended.returncode == 1 and [r["reason_code"] for r in rows(tmp_path)] == ["wrong_value"]


def test_a_model_that_refuses_the_key_is_one_row_and_one_line(tmp_path):
    with ChatServer(lambda *_: failure(401, "bad key sk-***")) as server:
        ended = sweep(tmp_path, server)
    [row] = rows(tmp_path)
    assert row["reason_code"] == "author_failed" and "OPENAI_API_KEY" in row["message"]
    assert ended.returncode == 1 and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "m", "temprature": 1}, "author_options.temprature"),
        ({"model": "m", "samples": 0}, "author_options.samples: expected at least 1"),
        ({"model": "m", "max_tokens": "many"}, "author_options.max_tokens: expected int"),
        ({"model": "m", "style": "three_stage"}, "author_options.style"),
        ({"model": "m", "max_tokens": 90000}, "less than token_limit"),
        ({}, "--model"),
    ],
)
def test_wrong_options_are_named(options, said):
    with pytest.raises(InputError, match=re.escape(said)):
        read_settings("llm", options, Budget())


def test_wrong_options_are_one_line_and_leave_nothing_behind(tmp_path):
    with ChatServer(answering(PROGRAM)) as server:
        ended = sweep(tmp_path, server, plan=PLAN.replace("repairs: 2", "repeirs: 2"))
    assert ended.returncode == 2 and "did you mean 'repairs'" in ended.stderr and "Traceback" not in ended.stderr
    assert not (tmp_path / "catalog").exists()
