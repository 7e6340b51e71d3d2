"""CUDA that a model wrote on a real GPU: launched from data, held to the oracle, timed, stored, loaded and called.

A model's recorded first answer with its device code unchanged, and one written by hand for the tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recorded_cuda import FOLDER, device_source, launch_text

import catalog
from catalog import store
from farm import stages
from farm.devices import arch_for, device_for
from farm.jobs import Job, Row, Shop
from generator.authors.answers import extract
from generator.canonical import digest_text
from generator.spec import AttentionSpec, Rule
from generator.targets import find_target
from generator.translate.direct import read_direct
from generator.translate.records import Translated
from verifier.compile import compile_translated
from verifier.judge import judge
from verifier.records import Binary, Passed

pytestmark = pytest.mark.gpu
CAUSAL = (Rule.make("causal"),)


def need(target: str) -> None:
    if device_for(target) is None:
        pytest.skip(f"no device here runs {target}")


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_the_recorded_answer_is_right(device: str, cache: Path, causal: bool) -> None:
    need("sm_90a")
    spec = AttentionSpec(4, 2, 128, 128, 2, 300, 300, "bf16", CAUSAL if causal else ())
    translated = read_direct(device_source(), launch_text(causal), spec, find_target("sm_90a"))
    assert isinstance(translated, Translated), str(translated)
    binary = compile_translated(translated, cache)
    assert isinstance(binary, Binary), binary
    verdict = judge(binary, translated.launch, spec, device=device)
    assert isinstance(verdict, Passed), verdict


def attempted(spec: AttentionSpec, target: str, source: str, launch: str, cache: Path, folder: Path, device: str) -> Row:
    """One attempt of the sweep, its row in a catalog of its own."""
    opened = store.open(folder / "catalog", create=True)
    shop = Shop(opened.uri, str(cache), sweep_id="gpu")
    key = digest_text(target + source + launch)
    job = Job(key, spec, target, "", 0.3, ("torch-sdpa",), arch=arch_for(target), source=source, launch=launch)
    row = stages.run_attempt(job, shop, device)
    with opened.writer("gpu") as writer:
        writer.append(row)
    return row


def called(row: Row, folder: Path, **call: object) -> None:
    """The stored kernel gives what torch gives, on contiguous tensors and on others."""
    catalog.configure(catalog=str(folder / "catalog"))
    try:
        for contiguous in (True, False):
            tensors = [torch.randn(1, 256, 4, row["head_dim"], device="cuda").to(call["dtype"]).transpose(1, 2) for _ in range(3)]
            q, k, v = (t.contiguous() for t in tensors) if contiguous else tensors
            with torch.no_grad(), catalog.attention_kernel(row["binary_hash"], require=True):
                out = catalog.scaled_dot_product_attention(q, k, v, is_causal=True)
            assert catalog.last_decision().kernel_id == row["binary_hash"][:12]
            expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
            torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    finally:
        catalog.configure(catalog=None)


def test_the_recorded_answer_is_timed_stored_and_served(device: str, cache: Path, tmp_path: Path) -> None:
    need("sm_90a")
    spec = AttentionSpec(4, 4, 128, 128, 1, 256, 256, "bf16", CAUSAL)
    row = attempted(spec, "sm_90a", device_source(), launch_text(causal=True), cache, tmp_path, device)
    assert row["reason_code"] == "ok" and row["p50_s"] > 0 and row["l2_state"] == "cold", row["message"]
    called(row, tmp_path, dtype=torch.bfloat16)


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
def test_an_answer_in_cuda_is_timed_stored_and_served(device: str, cache: Path, tmp_path: Path, target: str) -> None:
    need(target)
    answer = extract((FOLDER / "written/direct_cuda.md").read_text())
    source, launch = answer.get("source"), answer.get("launch")
    assert source is not None and launch is not None
    spec = AttentionSpec(4, 4, 32, 32, 1, 256, 256, "fp16", CAUSAL)
    row = attempted(spec, target, source, launch, cache, tmp_path, device)
    assert row["reason_code"] == "ok" and row["p50_s"] > 0, row["message"]
    called(row, tmp_path, dtype=torch.float16)
