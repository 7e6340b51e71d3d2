"""From a program to a call on CUDA tensors: built, judged, stored, loaded, launched on the right stream from any thread."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from gpu_programs import spec

import catalog
from catalog import store
from farm import stages
from farm.devices import arch_for, device_for
from farm.jobs import Job, Shop
from generator.authors.rules import RuleAuthor
from generator.canonical import digest_text
from generator.tl.fill import fill, hole_choices
from generator.tl.printer import print_program

pytestmark = pytest.mark.gpu
SPEC = spec("bf16", 64, seqlen=256, heads=8, kv_heads=8)


@pytest.fixture(scope="module", params=["sm_90a", "sm_80"])
def row(request, device: str, cache: Path, tmp_path_factory) -> dict:
    """A catalog with one kernel in it, and its row."""
    target = request.param
    if device_for(target) is None:
        pytest.skip(f"no device here runs {target}")
    folder = tmp_path_factory.mktemp(target)
    opened = store.open(folder / "catalog", create=True)
    code = RuleAuthor().code(SPEC, target)
    program = print_program(fill(code, next(hole_choices(code))))
    shop = Shop(opened.uri, str(cache), sweep_id="gpu")
    made = Job(digest_text(target), SPEC, target, program, measure_s=0.3, arch=arch_for(target))
    row = stages.run_attempt(made, shop, device)
    with opened.writer("gpu") as writer:
        writer.append(row)
    catalog.configure(catalog=str(folder / "catalog"))
    yield row
    catalog.configure(catalog=None)


def tensors(batch: int = 1, seqlen: int = 256) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(batch, 8, seqlen, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))


def served(row: dict, q, k, v) -> torch.Tensor:
    """The kernel's answer, whether it is faster than torch's or not."""
    with torch.no_grad(), catalog.attention_kernel(row["binary_hash"], require=True):
        out = catalog.scaled_dot_product_attention(q, k, v, is_causal=True)
    decision = catalog.last_decision()
    assert decision.kernel_id is not None, decision
    return out


def reference(q, k, v) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)


def test_the_row_says_what_was_verified_where(row: dict, device: str) -> None:
    assert row["reason_code"] == "ok", row["message"]
    borrowed = row["target"] in device_for(row["target"]).borrowed
    assert (row["verified_on"] is not None) is borrowed and row["device_key"] == device_for(row["target"]).key
    assert row["sm_clock_after_mhz"] > 0 and row["l2_state"] == "cold" and row["driver"] and row["registers"] > 0


def test_a_call_matches_sdpa(row: dict) -> None:
    q, k, v = tensors()
    torch.testing.assert_close(served(row, q, k, v).float(), reference(q, k, v), atol=2e-2, rtol=2e-2)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(seqlen=200))
    torch.testing.assert_close(served(row, q, k, v).float(), reference(q, k, v), atol=2e-2, rtol=2e-2)


def test_a_call_waits_for_the_current_stream(row: dict) -> None:
    """Queries that a side stream still computes are what the kernel sees, without a synchronisation in between."""
    q, k, v = tensors()
    served(row, q, k, v)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        late = torch.zeros_like(q)
        torch.cuda._sleep(200_000_000)
        late.copy_(q)
        out = served(row, late, k, v)
    side.synchronize()
    torch.testing.assert_close(out.float(), reference(q, k, v), atol=2e-2, rtol=2e-2)


def test_a_thread_without_a_context_may_call(row: dict) -> None:
    q, k, v = tensors()
    results: list = []

    def work() -> None:
        try:
            results.append(served(row, q, k, v))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert isinstance(results[0], torch.Tensor), results
    torch.testing.assert_close(results[0].float(), reference(q, k, v), atol=2e-2, rtol=2e-2)


def test_a_captured_call_replays_on_new_values(row: dict) -> None:
    q, k, v = tensors()
    served(row, q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = served(row, q, k, v)
    for x, y in zip((q, k, v), tensors(), strict=True):
        x.copy_(y)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out.float(), reference(q, k, v), atol=2e-2, rtol=2e-2)
