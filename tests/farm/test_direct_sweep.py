"""`--author llm-direct` and `--translator llm` from request to a kernel that a torch program loads, against a real HTTP server.

The answers are written by hand for these tests (tests/responses/written): no measurement of any model.
"""

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from chat_server import ChatServer, completion
from model_runs import PROGRAM, SKETCH, fenced, rows, sweep

import catalog
from farm.foreign import Refused, read_source
from farm.jobs import Job
from generator.authors.answers import extract
from generator.spec import AttentionSpec, Rule
from generator.translate.records import Translated

pytestmark = pytest.mark.usefixtures("any_pace")
WRITTEN = Path(__file__).parent.parent / "responses/written"
CPP = (WRITTEN / "direct_cpu.md").read_text()
CUDA = (WRITTEN / "direct_cuda.md").read_text()
PLAN = """
name: direct
author: llm-direct
author_options: {model: test-model, repairs: 4, improvements: 0}
tuning: {candidates: 1, measure_s: 0.05}
rivals: [torch-sdpa]
targets: [cpu]
models:
  - {name: tiny, num_heads: 2, num_kv_heads: 1, head_dim: 32, masks: [causal], dtypes: [fp32], seqlens: [64]}
"""


def answering(*answers):
    queue = list(answers)
    return lambda request, _: completion(queue.pop(0))


def last_question(server):
    return server.requests[-1]["messages"][-1]["content"]


def test_an_answer_is_judged_measured_stored_and_loaded(tmp_path):
    with ChatServer(answering(CPP)) as server:
        ended = sweep(tmp_path, server, plan=PLAN)
    assert ended.returncode == 0, ended.stderr
    [row] = rows(tmp_path)
    assert (row["reason_code"], row["author_mode"], row["author"], row["language"]) == ("ok", "llm-direct", "test-model", "c++")
    assert row["p50_s"] > 0 and row["ratio_p50"] > 0 and row["program_hash"] is None
    stored = catalog.open(tmp_path / "catalog").artifacts
    assert stored.text(row["source_hash"]) == extract(CPP).get("source"), "the source as its author wrote it"
    assert json.loads(row["launch"])["target_facts"]["foreign"] is True
    system, asked = (m["content"] for m in server.requests[0]["messages"])
    assert "launch description" in system and "masks.causal" in asked and "tensor LSE (Batch, Heads, SeqQ) f32" in asked
    catalog.configure(catalog=str(tmp_path / "catalog"))
    try:
        q, k, v = torch.randn(1, 2, 64, 32), torch.randn(1, 1, 64, 32), torch.randn(1, 1, 64, 32)
        with catalog.attention_kernel(row["binary_hash"], require=True):
            out = catalog.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        assert catalog.last_decision().kernel_id == row["binary_hash"][:12]
    finally:
        catalog.configure(catalog=None)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


#: What is wrong -> (edit of the right answer, reason of the row, what the model is told).
FAULTY = [
    (lambda a: a.replace('"LSE"]', '"LSE", "P"]'), "source_rejected", "launch.tensors"),
    (lambda a: a.replace("namespace {\n", 'namespace {\nvoid f() { asm("hlt"); }\n', 1), "source_rejected", "source line 6: asm"),
    (lambda a: a.replace("float top = -INFINITY", "float top = -INFINTY"), "compile_error", "INFINTY"),
    (lambda a: a.replace("j <= last", "j < last"), "wrong_value", "input:"),
    (lambda a: a.replace("lse[row * s[18]] =", "float unused ="), "unwritten_output", "LSE"),
    (lambda a: a.replace("```launch", "```text"), "author_failed", "tagged `launch`"),
]


def test_every_fault_gets_its_verdict_and_is_said(tmp_path):
    plan = PLAN.replace("repairs: 4", "repairs: 6")
    with ChatServer(answering(*(edit(CPP) for edit, _, _ in FAULTY), CPP)) as server:
        ended = sweep(tmp_path, server, plan=plan)
        asked = [request["messages"][-1]["content"] for request in server.requests[1:]]
    assert ended.returncode == 0, ended.stderr
    found = sorted(rows(tmp_path), key=lambda row: row["generation"])
    assert [row["reason_code"] for row in found] == [*(reason for _, reason, _ in FAULTY), "ok"]
    for question, (_, _, told) in zip(asked, FAULTY, strict=True):
        assert told in question and "one tagged `launch`" in question
    assert [row["parent_row_id"] for row in found[1:]] == [row["row_id"] for row in found[:-1]]


def test_a_replay_ends_in_the_same_rows(tmp_path):
    wrong = CPP.replace("j <= last", "j < last")
    with ChatServer(answering(wrong, CPP)) as server:
        assert sweep(tmp_path, server, plan=PLAN).returncode == 0
    other = tmp_path / "other"
    (other / "catalog").mkdir(parents=True)
    (tmp_path / "catalog" / "transcripts").rename(other / "catalog" / "transcripts")
    assert sweep(other, None, "--replay", plan=PLAN, key="").returncode == 0

    def verdicts(folder):
        return {(row["source_hash"], row["reason_code"]) for row in rows(folder)}

    assert verdicts(other) == verdicts(tmp_path) and len(verdicts(other)) == 2


def two_stages(request, _):
    said = request["messages"][-1]["content"]
    if "tagged `sketch`" in said:
        return completion(f"```sketch\n{SKETCH}```")
    return completion(CPP if "Translate the program" in said else fenced(PROGRAM))


def test_the_model_translates_its_own_program(tmp_path):
    plan = PLAN.replace("llm-direct", "llm")
    with ChatServer(two_stages) as server:
        ended = sweep(tmp_path, server, "--translator", "llm", plan=plan)
        asked = last_question(server)
    assert ended.returncode == 0, ended.stderr
    [row] = rows(tmp_path)
    assert (row["reason_code"], row["author_mode"], row["language"]) == ("ok", "llm", "c++")
    assert (row["tokens_in"], row["tokens_out"]) == (300, 150), "of sketch, code and translation"
    stored = catalog.open(tmp_path / "catalog").artifacts
    assert stored.text(row["source_hash"]) == extract(CPP).get("source")
    assert stored.text(row["tl_hash"]) == PROGRAM and stored.text(row["program_hash"]) in asked
    assert len(json.loads(stored.get(row["transcript_hash"]))) == 3
    assert "vexp2" in asked, "our headers' functions are named"


def test_a_wrong_program_is_mended_before_it_is_translated(tmp_path):
    programs = [fenced(PROGRAM.replace("kv <= q", "kv < q")), fenced(PROGRAM)]

    def behave(request, _):
        said = request["messages"][-1]["content"]
        return completion(CPP if "Translate the program" in said else programs.pop(0))

    plan = PLAN.replace("llm-direct", "llm")
    with ChatServer(behave) as server:
        ended = sweep(tmp_path, server, "--translator", "llm", "--style", "one_pass", plan=plan)
        assert len(server.requests) == 3
    assert ended.returncode == 0, ended.stderr
    assert sorted(row["reason_code"] for row in rows(tmp_path)) == ["ok", "wrong_value"]


@pytest.mark.skipif(find_spec("cuda") is None, reason="needs NVRTC")
def test_cuda_answers_compile_for_every_card_and_wait_for_one(tmp_path):
    plan = PLAN.replace("[cpu]", "[sm_75, sm_80, sm_90a]").replace("[fp32]", "[fp16]")
    with ChatServer(lambda *_: completion(CUDA)) as server:
        ended = sweep(tmp_path, server, plan=plan)
        assert len(server.requests) == 3, "one question for each target"
    assert "Traceback" not in ended.stderr
    found = rows(tmp_path)
    assert {(row["target"], row["reason_code"]) for row in found} == {
        (target, "compiled_unverified") for target in ("sm_75", "sm_80", "sm_90a")
    }
    assert all(row["registers"] and row["spill_bytes"] == 0 and row["entry_point"] == "causal_rows" for row in found)


def test_flags_for_a_model_need_one(tmp_path):
    plan = PLAN.replace("author: llm-direct\n", "").replace(
        "author_options: {model: test-model, repairs: 4, improvements: 0}\n", ""
    )
    ended = sweep(tmp_path, None, "--translator", "llm", plan=plan)
    assert ended.returncode == 2 and "--translator: says how a language model is asked" in ended.stderr
    ended = sweep(tmp_path, None, "--translator", "theirs", "--base-url", "http://localhost:1/v1", plan=PLAN)
    assert ended.returncode == 2 and "expected one of ours, llm, found 'theirs'" in ended.stderr


def test_headers_that_this_machine_lacks_are_not_the_models_fault(tmp_path, monkeypatch):
    monkeypatch.setattr("farm.foreign.toolkit_headers", lambda: ((), "none"))
    spec = AttentionSpec(2, 1, 32, 32, 1, 64, 64, "fp16", (Rule.make("causal"),))
    source, launch = extract(CUDA).get("source"), extract(CUDA).get("launch")
    job = Job("0" * 64, spec, "sm_80", "", source=source, launch=launch)
    assert isinstance(read_source(job), Translated), "our own headers are always there"
    refused = read_source(dataclasses.replace(job, source="#include <cuda_fp16.h>\n" + source))
    assert isinstance(refused, Refused) and refused.reason == "not_run" and "pip install" in refused.message
