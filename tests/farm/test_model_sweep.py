"""`farm sweep --author llm` from request to verified, measured kernel, against a real HTTP server that plays written answers.

The answers are written by hand for these tests (tests/responses/written): no measurement of any model.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chat_server import ChatServer, completion, failure

import catalog
from generator.authors.answers import extract

RIGHT = (Path(__file__).parent.parent / "responses/written/right.md").read_text()
SKETCH = extract(RIGHT).get("sketch")
PROGRAM = extract(RIGHT).get("tl")
PLAN = """
name: model
author: llm
author_options: {model: test-model, repairs: 2, improvements: 0}
tuning: {candidates: 1, measure_s: 0.05}
rivals: [torch-sdpa]
targets: [cpu]
models:
  - {name: tiny, num_heads: 2, num_kv_heads: 1, head_dim: 32, masks: [causal], dtypes: [fp32], seqlens: [64]}
"""

#: What is wrong -> (edit of the right program, reason of the row, what the model is told).
FAULTY = {
    "Reshape left out": (
        lambda p: p.replace("PA, V", "P, V").replace(next(line for line in p.splitlines(True) if "Reshape" in line), ""),
        "tl_rejected",
        "Reshape",
    ),
    "transposed operand": (lambda p: p.replace("GEMM Q, K^T", "GEMM K, Q^T").replace("(BN, D) in", "(BM, D) in"), None, ""),
    "wrong tile index": (lambda p: p.replace("V (BN, DV) in coordinate [L = j]", "V (BN, DV) in coordinate [L = m]"), "wrong_value", "tile of V"),
    "off by one": (lambda p: p.replace("kv <= q", "kv < q"), "wrong_value", "has to be visible"),
    "no rescale": (lambda p: p.replace("  Compute acc = acc * alpha\n", ""), "wrong_value", "rescaled"),
    "a keyword that does not exist": (lambda p: p.replace("Compute mi = mnew", "Swap mi, mnew"), "tl_rejected", "Swap"),
    "old syntax": (lambda p: p.replace("Compute P = exp2((S - base) * c)", "P <- exp2((S - base) * c)"), "tl_rejected", "P"),
    "no program": (lambda p: "", "author_failed", "no block"),
}


def fenced(program):
    return f"Here it is.\n\n```tl\n{program}```\nI hope that helps." if program else "I would rather talk about the weather."


def sweep(tmp_path, server, *flags, plan=PLAN, key="sk-test-0123456789"):
    path = tmp_path / "plan.yaml"
    path.write_text(plan)
    environment = os.environ | {"OPENAI_API_KEY": key, "FARM_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "farm", "sweep", str(path), "--catalog", str(tmp_path / "catalog"), "--executor", "local", "--json"]
    command += ["--base-url", server.base_url] if server else []
    ended = subprocess.run([*command, *flags], capture_output=True, text=True, env=environment, timeout=180)
    return ended


def rows(tmp_path):
    return sorted(catalog.open(tmp_path / "catalog").rows().to_pylist(), key=lambda r: r["sequence"])


def answering(*programs):
    """A server's behaviour: the sketch when asked for one, then the programs in turn."""
    queue = list(programs)

    def behave(request, _):
        if "tagged `sketch`" in request["messages"][-1]["content"]:
            return completion(f"```sketch\n{SKETCH}```")
        return completion(fenced(queue.pop(0)))

    return behave


def test_from_request_to_verified_kernel_in_twenty_seconds(tmp_path):
    start = time.monotonic()
    with ChatServer(answering(PROGRAM)) as server:
        ended = sweep(tmp_path, server)
    assert ended.returncode == 0, ended.stderr
    [row] = rows(tmp_path)
    assert row["reason_code"] == "ok" and row["p50_s"] > 0
    assert (row["author"], row["author_mode"], row["tokens_in"], row["tokens_out"]) == ("test-model", "llm", 200, 100)
    stored = catalog.open(tmp_path / "catalog").artifacts
    conversation = json.loads(stored.get(row["transcript_hash"]))
    assert [e["answer"]["text"] for e in conversation] == [f"```sketch\n{SKETCH}```", fenced(PROGRAM)]
    assert stored.get(row["sketch_hash"]).decode().startswith("Copy Q")
    assert time.monotonic() - start < 20 or os.getloadavg()[0] > 3


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_answer_gets_its_verdict_and_is_repaired(tmp_path, name):
    edit, reason, told = FAULTY[name]
    with ChatServer(answering(edit(PROGRAM), PROGRAM)) as server:
        ended = sweep(tmp_path, server)
        asked = server.requests[-1]["messages"][-1]["content"]
    assert ended.returncode == 0, ended.stderr
    first, second = rows(tmp_path)
    assert first["reason_code"] == reason if reason else first["reason_code"] in ("tl_rejected", "wrong_value")
    assert second["reason_code"] == "ok" and second["parent_row_id"] == first["row_id"]
    assert told in asked and "What was found" in asked


def test_a_second_start_asks_nothing_and_does_nothing_again(tmp_path):
    with ChatServer(answering(PROGRAM.replace("kv <= q", "kv < q"), PROGRAM)) as server:
        assert sweep(tmp_path, server).returncode == 0
        asked = len(server.requests)
        again = sweep(tmp_path, server)
        assert again.returncode == 0 and len(server.requests) == asked
    assert len(rows(tmp_path)) == 2 and json.loads(again.stdout)["known"] == 2


def test_a_replay_asks_nobody_and_ends_in_the_same_rows(tmp_path):
    with ChatServer(answering(PROGRAM.replace("kv <= q", "kv < q"), PROGRAM)) as server:
        assert sweep(tmp_path, server).returncode == 0
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


def test_the_key_is_stored_nowhere(tmp_path):
    key = "sk-very-secret-9876543210"
    with ChatServer(answering(PROGRAM)) as server:
        ended = sweep(tmp_path, server, key=key)
    assert ended.returncode == 0
    assert key not in ended.stdout + ended.stderr
    assert not any(key.encode() in f.read_bytes() for f in tmp_path.rglob("*") if f.is_file())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("{model: m, temprature: 1}", "author_options.temprature"),
        ("{model: m, samples: 0}", "author_options.samples: expected at least 1"),
        ("{model: m, max_tokens: many}", "author_options.max_tokens: expected int"),
        ("{model: m, style: three_stage}", "author_options.style"),
        ("{model: m, max_tokens: 90000}", "less than token_limit"),
        ("{}", "--model"),
    ],
)
def test_wrong_options_are_named(tmp_path, options, said):
    plan = PLAN.replace("{model: test-model, repairs: 2, improvements: 0}", options)
    with ChatServer(answering(PROGRAM)) as server:
        ended = sweep(tmp_path, server, plan=plan)
    assert ended.returncode == 2 and said in ended.stderr and "Traceback" not in ended.stderr
    assert not (tmp_path / "catalog").exists()
