"""`farm sweep --author llm` from request to verified, measured kernel, against a real HTTP server that plays written answers.

The answers are written by hand for these tests (tests/responses/written): no measurement of any model.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from chat_server import ChatServer, completion, failure

import catalog
from catalog.artifacts import Artifacts
from catalog.locations import Location
from farm.console import InputError
from farm.model_search import ModelSearch
from farm.model_settings import read_settings
from farm.plan import Budget, read_plan
from farm.search import Versions
from farm.variants import load_variants
from generator.authors.answers import extract
from generator.authors.clients import OpenAIClient
from generator.authors.endpoint import Endpoint
from generator.authors.transcripts import TranscriptStore
from generator.spec import AttentionSpec, Rule
from generator.tl.parser import parse_or_raise
from verifier.review import review

RESPONSES = Path(__file__).parent.parent / "responses"
RIGHT = (RESPONSES / "written/right.md").read_text()
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

SPEC = AttentionSpec(2, 1, 32, 32, 1, 64, 64, "fp32", (Rule.make("causal"),), name="tiny")
#: One folder of binaries and self-tests for all sweeps of this file.
CACHE = Path(tempfile.gettempdir()) / f"farm-model-sweep-{os.getuid()}"

#: What is wrong -> (edit of the right program, reason of the row, what the model is told).
FAULTY = {
    "Reshape left out": (
        lambda p: p.replace("PA, V", "P, V").replace(next(line for line in p.splitlines(True) if "Reshape" in line), ""),
        "tl_rejected",
        "Reshape",
    ),
    "transposed operand": (lambda p: p.replace("GEMM Q, K^T", "GEMM K, Q^T").replace("(BN, D) in", "(BM, D) in"), None, ""),
    "wrong tile index": (
        lambda p: p.replace("V (BN, DV) in coordinate [L = j]", "V (BN, DV) in coordinate [L = m]"),
        "wrong_value",
        "tile of V",
    ),
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
    environment = os.environ | {"OPENAI_API_KEY": key, "FARM_CACHE": str(CACHE)}
    command = [
        sys.executable,
        "-m",
        "farm",
        "sweep",
        str(path),
        "--catalog",
        str(tmp_path / "catalog"),
        "--executor",
        "local",
        "--json",
    ]
    command += ["--base-url", server.base_url] if server else []
    return subprocess.run([*command, *flags], capture_output=True, text=True, env=environment, timeout=600)


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


def solve(tmp_path, server, monkeypatch, spec=SPEC):
    """One search with real review and no compiler: an attempt that reaches the stages is taken for right. Returns the jobs."""
    jobs = []

    async def attempt(job):
        jobs.append(job)
        reason, message = job.trouble or ("ok", "")
        return {"reason_code": reason, "message": message, "p50_s": 1e-5, "row_id": f"row {len(jobs)}"}

    def review_here(text, spec):
        return review(parse_or_raise(text), spec)

    async def main():
        settings = read_settings("llm", {"model": "test-model", "repairs": 2, "improvements": 0}, Budget())
        store = TranscriptStore(tmp_path / "transcripts")
        versions = Versions("1", "1")
        async with OpenAIClient(Endpoint(server.base_url, "sk-test"), store) as client:
            artifacts = Artifacts(Location.of(tmp_path / "catalog"))
            search = ModelSearch(read_plan(PLAN, "plan.yaml"), versions, settings, client, store, artifacts)
            await search.solve(spec, "cpu", attempt)

    monkeypatch.setattr("farm.model_search.review_apart", review_here)
    asyncio.run(main())
    return jobs


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_answer_gets_its_verdict_and_is_repaired(tmp_path, monkeypatch, name):
    edit, reason, told = FAULTY[name]
    with ChatServer(answering(edit(PROGRAM), PROGRAM)) as server:
        first, second = solve(tmp_path, server, monkeypatch)
        asked = server.requests[-1]["messages"][-1]["content"]
    assert first.trouble[0] == reason if reason else first.trouble[0] in ("tl_rejected", "wrong_value")
    assert second.trouble is None and second.program and second.columns["parent_row_id"] == "row 1"
    assert told in asked and "What was found" in asked


RECORDED = {
    "prefix_mla": AttentionSpec(4, 2, 192, 128, 1, 100, 100, "bf16", (Rule.make("prefix", length=40),)),
    "window_softcap": AttentionSpec(
        4, 2, 128, 128, 1, 100, 100, "bf16", (Rule.make("recent", size=30),), (Rule.make("softcap", cap=20.0),)
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_first_answers_of_a_model_are_right(tmp_path, monkeypatch, name):
    load_variants(Path(__file__).parent / "recent_window.py")
    answer = (RESPONSES / f"{name}.answer.md").read_text()
    with ChatServer(lambda *_: completion(answer)) as server:
        [job] = solve(tmp_path, server, monkeypatch, RECORDED[name])
    assert job.trouble is None and job.program.startswith("Kernel ") and job.texts["sketch"].startswith("Copy Q")


def test_a_recorded_answer_to_another_question_is_wrong(tmp_path, monkeypatch):
    answer = (RESPONSES / "prefix_mla.answer.md").read_text()
    causal = AttentionSpec(4, 2, 192, 128, 1, 100, 100, "bf16", (Rule.make("causal"),))
    with ChatServer(lambda *_: completion(answer)) as server:
        jobs = solve(tmp_path, server, monkeypatch, causal)
    assert len(jobs) >= 1 and jobs[0].trouble[0] == "wrong_value" and "Prefix" in jobs[0].trouble[1]


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
