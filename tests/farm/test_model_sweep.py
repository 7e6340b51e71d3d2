"""`farm sweep --author llm` from request to verified, measured kernel, against a real HTTP server that plays written answers."""

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import replace

import pytest
from chat_server import ChatServer, Reply, completion, failure
from model_runs import CACHE, PLAN, PROGRAM, SKETCH, answering, environment, fenced, rows, sweep, sweep_apart, sweep_command

import catalog
from farm.console import InputError
from farm.model_settings import read_settings
from farm.plan import Budget
from generator.authors.transcripts import TranscriptStore

pytestmark = [pytest.mark.usefixtures("any_pace"), pytest.mark.slow]


def test_from_request_to_verified_kernel_in_twenty_seconds(tmp_path):
    """Once the machine's self-test has been: the first sweep of a machine and version runs it."""
    (tmp_path / "before").mkdir()
    with ChatServer(answering(PROGRAM)) as server:
        sweep(tmp_path / "before", server)
    start = time.monotonic()
    with ChatServer(answering(PROGRAM)) as server:
        ended = sweep_apart(tmp_path, server, plan=PLAN.replace("[torch-sdpa]", "[]"))  # nobody to be disturbed
    wall_s = time.monotonic() - start
    assert ended.returncode == 0, ended.stderr
    [row] = rows(tmp_path)
    assert row["reason_code"] == "ok" and row["p50_s"] > 0
    assert (row["author"], row["author_mode"], row["tokens_in"], row["tokens_out"]) == ("test-model", "llm", 200, 100)
    stored = catalog.open(tmp_path / "catalog").artifacts
    conversation = json.loads(stored.get(row["transcript_hash"]))
    assert [e["answer"]["text"] for e in conversation] == [f"```sketch\n{SKETCH}```", fenced(PROGRAM)]
    assert stored.get(row["sketch_hash"]).decode().startswith("Copy Q")
    assert "model test-model: 2 answers, 200 tokens in, 100 out" in json.loads(ended.stdout)["author"]
    assert wall_s < 20 or os.getloadavg()[0] > 0.75 * (os.cpu_count() or 1), "on a machine that has nothing else to do"


def test_the_key_is_in_no_file_and_no_line_whatever_the_server_does(tmp_path):
    """Answers that hold it, errors that repeat it, a program that is made of it: it goes to the endpoint and nowhere else."""
    key = "sk-very-secret-9876543210"
    replies = [
        failure(429, f"key {key} is too fast"),
        completion(f"```sketch\n{key}\n```"),
        completion(fenced(f"# {key}\n" + PROGRAM.replace("Compute mi", f"{key} mi")), finish_reason=key),
        failure(401, f"Incorrect API key provided: {key}"),
    ]
    before = time.time()
    with ChatServer(lambda _, n: replies[n]) as server:
        ended = sweep(tmp_path, server, key=key)
        assert server.keys == [f"Bearer {key}"] * 4
    assert [r["reason_code"] for r in rows(tmp_path)] == ["tl_rejected"] and "[key]" in rows(tmp_path)[0]["message"]
    assert key not in ended.stdout + ended.stderr and "[key]" in ended.stderr
    files = [f for folder in (tmp_path, CACHE) for f in folder.rglob("*") if f.is_file() and f.stat().st_mtime >= before - 1]
    assert len(files) > 5 and not [f for f in files if key.encode() in f.read_bytes()]


def conversations(folder):
    """What every row was made from, byte for byte: the conversation, the prompt, the program."""
    return {(r["transcript_hash"], r["prompt_hash"], r["tl_hash"], r["reason_code"]) for r in rows(folder)}


def test_a_second_start_asks_nothing_and_a_replay_is_the_same_bit_for_bit(tmp_path):
    wrong, other_tiles = PROGRAM.replace("kv <= q", "kv < q"), PROGRAM.replace("BM = 32", "BM = 16")
    plan = PLAN.replace("improvements: 0", "improvements: 1")
    with ChatServer(answering(wrong, PROGRAM, other_tiles)) as server:
        assert sweep(tmp_path, server, plan=plan).returncode == 0
        asked = len(server.requests)
        assert "median time of a call" in server.requests[-1]["messages"][-1]["content"]
        again = sweep(tmp_path, server, plan=plan)
        assert again.returncode == 0 and len(server.requests) == asked == 4
    assert len(rows(tmp_path)) == 3 and json.loads(again.stdout)["known"] == 3
    before, copy = conversations(tmp_path), tmp_path / "other"
    assert len(before) == 3
    (copy / "catalog").mkdir(parents=True)
    (tmp_path / "catalog" / "transcripts").rename(copy / "catalog" / "transcripts")
    record = {f: f.read_bytes() for f in (copy / "catalog" / "transcripts").rglob("*") if f.is_file()}
    ended = sweep(copy, None, "--replay", plan=plan, key="")
    assert ended.returncode == 0, ended.stderr
    assert conversations(copy) == before, "measured anew, but told what was told then"
    assert {f: f.read_bytes() for f in (copy / "catalog" / "transcripts").rglob("*") if f.is_file()} == record


def stored_questions(folder):
    """The messages of every answer on record."""
    exchanges = TranscriptStore(folder / "catalog" / "transcripts").exchanges()
    return [[{"role": m.role, "content": m.content} for m in e.request.messages] for e in exchanges]


def test_what_a_killed_sweep_was_answered_is_not_asked_for_again(tmp_path):
    """Killed with a request in flight, with the first answer on record, and while the program is judged; then run to its end."""
    store, sent = TranscriptStore(tmp_path / "catalog" / "transcripts"), 0
    script = answering(PROGRAM.replace("kv <= q", "kv < q"), PROGRAM)
    answers = {}

    def behave(request, number):
        """The same question gets the same answer, half a second later."""
        question = json.dumps(request["messages"])
        if question not in answers:
            answers[question] = script(request, number)
        return replace(answers[question], delay_s=0.5)

    with ChatServer(behave) as server:
        for have in (0, 1, 2):
            known, already = stored_questions(tmp_path), len(server.requests)
            process = subprocess.Popen(
                sweep_command(tmp_path, server),
                env=environment("sk-test-0123456789"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            until = time.monotonic() + 60
            while (len(stored_questions(tmp_path)) < have or len(server.requests) == already) and time.monotonic() < until:
                assert process.poll() is None
                time.sleep(0.02)
            process.kill()
            process.wait()
            assert not [r for r in server.requests[already:] if r["messages"] in known]
        known, already = stored_questions(tmp_path), len(server.requests)
        ended = sweep(tmp_path, server)
        assert not [r for r in server.requests[already:] if r["messages"] in known] and len(known) >= 2
        sent = len(server.requests)
    assert ended.returncode == 0 and rows(tmp_path)[-1]["reason_code"] == "ok"
    lost = sent - len(stored_questions(tmp_path))
    assert lost >= 1 and store.unsettled() >= lost
    assert f"perhaps paid: {store.unsettled()}" in json.loads(ended.stdout)["author"]


def test_ctrl_c_while_the_model_thinks_ends_at_once_and_says_how_to_go_on(tmp_path):
    with ChatServer(lambda *_: Reply(completion("late").body, delay_s=60)) as server:
        process = subprocess.Popen(
            sweep_command(tmp_path, server),
            env=environment("sk-test-0123456789"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        until = time.monotonic() + 60
        while not server.requests and time.monotonic() < until:
            time.sleep(0.02)
        asked = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and time.monotonic() - asked < 30
    assert "goes on from there" in err and "Traceback" not in err
    assert "perhaps paid: 1" in json.loads(out)["author"]


def test_money_is_counted_from_the_price_table_and_stops_the_sweep(tmp_path):
    wrong = [PROGRAM.replace("kv <= q", f"kv < q - {i}") for i in range(5)]
    plan = PLAN + "prices: {test-model: {in: 100, out: 1000}}\n"  # 0.06 USD an answer
    with ChatServer(answering(*wrong)) as server:
        ended = sweep(tmp_path, server, "--budget-usd", "0.1", plan=plan)
        assert len(server.requests) == 2, "asked while there was money, one answer beyond it"
    found = json.loads(ended.stdout)
    assert found["stop_reason"] == "budget usd: 0.12 of 0.1 spent" and "0.1200 USD" in found["author"]
    assert [r["cost_usd"] for r in rows(tmp_path)] == [0.12]


def test_a_money_budget_without_a_price_is_refused(tmp_path):
    with ChatServer(answering(PROGRAM)) as server:
        ended = sweep(tmp_path, server, "--budget-usd", "1")
        assert not server.requests
    assert ended.returncode == 2 and "no price is known for test-model" in ended.stderr and "prices:" in ended.stderr


def test_a_token_budget_stops_the_asking_and_a_larger_one_goes_on(tmp_path):
    wrong = PROGRAM.replace("kv <= q", "kv < q")
    with ChatServer(answering(wrong, PROGRAM)) as server:
        ended = sweep(tmp_path, server, "--budget-tokens", "300")
        assert len(server.requests) == 2
        assert ended.returncode == 1 and [r["reason_code"] for r in rows(tmp_path)] == ["wrong_value"]
        assert json.loads(ended.stdout)["stop_reason"] == "budget tokens: 300 of 300 spent"
        assert sweep(tmp_path, server, "--budget-tokens", "1000").returncode == 0
        assert len(server.requests) == 3
    assert [r["reason_code"] for r in rows(tmp_path)] == ["wrong_value", "ok"]


def test_a_model_that_refuses_the_key_is_one_row_and_one_line(tmp_path):
    plan = PLAN.replace("seqlens: [64]", "seqlens: [64, 65, 66, 67]")
    with ChatServer(lambda *_: failure(401, "bad key sk-***")) as server:
        ended = sweep(tmp_path, server, plan=plan)
    assert all(r["reason_code"] == "author_failed" and "OPENAI_API_KEY" in r["message"] for r in rows(tmp_path))
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert "answered 401" in json.loads(ended.stdout)["stop_reason"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "m", "temprature": 1}, "author_options.temprature"),
        ({"model": "m", "samples": 0}, "author_options.samples: expected at least 1"),
        ({"model": "m", "max_tokens": "many"}, "author_options.max_tokens: expected int"),
        ({"model": "m", "style": "three_stage"}, "author_options.style"),
        ({"model": "m", "max_tokens": 90000}, "less than token_limit"),
        ({"model": "m", "api_key": "sk-secret"}, "a plan holds no key; set OPENAI_API_KEY"),
        ({}, "--model"),
    ],
)
def test_wrong_options_are_named(options, said):
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        read_settings("llm", options, Budget())
    assert "sk-secret" not in str(caught.value)


def test_wrong_options_are_one_line_and_leave_nothing_behind(tmp_path):
    with ChatServer(answering(PROGRAM)) as server:
        ended = sweep(tmp_path, server, plan=PLAN.replace("repairs: 2", "repeirs: 2"))
    assert ended.returncode == 2 and "did you mean 'repairs'" in ended.stderr and "Traceback" not in ended.stderr
    assert not (tmp_path / "catalog").exists()


@pytest.mark.parametrize("where", ["flag", "plan", "variable"])
def test_where_the_model_is_comes_from_a_flag_the_plan_or_the_usual_variable(tmp_path, where):
    """The first that is there, in this order. Asked at once with a key that is refused: nothing needs to be built for that."""
    with ChatServer(lambda *_: failure(401, "no")) as right, ChatServer(lambda *_: failure(401, "no")) as wrong:
        plan, variables = PLAN, {}
        if where != "variable":
            variables["OPENAI_BASE_URL"] = wrong.base_url
            other = wrong if where == "flag" else right
            plan = PLAN.replace("{model: test-model", f"{{model: test-model, base_url: '{other.base_url}'")
        else:
            variables["OPENAI_BASE_URL"] = right.base_url
        ended = sweep(tmp_path, right if where == "flag" else None, plan=plan, **variables)
        assert len(right.requests) == 1 and not wrong.requests, ended.stderr
        assert right.keys == ["Bearer sk-test-0123456789"] and right.requests[0]["model"] == "test-model"
