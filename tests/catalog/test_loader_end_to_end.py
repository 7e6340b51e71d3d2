"""A kernel that the rule author wrote and the verifier passed answers calls from a catalog: every contract on the way, once."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import catalog
from catalog.schema import make_row
from generator.authors.rules import RuleAuthor
from generator.canonical import digest_text
from generator.spec import AttentionSpec, Rule
from generator.targets import TARGETS
from generator.tl.fill import fill, hole_choices
from generator.translate import translate
from verifier.compile import compile_translated
from verifier.environment import device_key
from verifier.judge import judge
from verifier.records import Passed

pytestmark = [pytest.mark.usefixtures("fresh_loader"), pytest.mark.slow]


def add(store, folder, spec):
    """One row, made as a sweep makes it, but for the times."""
    program = RuleAuthor().code(spec, "cpu")
    translated = translate(fill(program, next(iter(hole_choices(program)))), TARGETS["cpu"])
    binary = compile_translated(translated, folder / "builds")
    verdict = judge(binary, translated.launch, spec)
    assert isinstance(verdict, Passed), verdict
    with open(binary.path, "rb") as file:
        name = store.artifacts.put(file.read())
    with store.writer("run") as writer:
        writer.append(
            make_row(
                attempt_key=digest_text(spec.hash), reason_code="ok", spec=spec, target="cpu", translator_version="test",
                harness_version="test", device_key=device_key().hash, source_hash=translated.hash, binary_hash=name,
                launch=translated.launch, rule_id=verdict.rule_id, verified_shapes=list(verdict.shapes), deterministic=True,
                p50_s=1e-5, baseline_p50_s=1e-3, isa=[translated.launch.target_facts["isa"]],
            )
        )  # fmt: skip
    return name[:12]


@pytest.mark.parametrize(
    ("masks", "scores"),
    [((Rule.make("causal"),), ()), ((Rule.make("window", left=9, right=0),), (Rule.make("softcap", cap=4.0),))],
)
def test_a_written_kernel_serves(tmp_path, masks, scores):
    store = catalog.open(tmp_path / "catalog", create=True)
    kernel = add(store, tmp_path, AttentionSpec(4, 2, 32, 32, 2, 60, 60, masks=masks, scores=scores))
    catalog.configure(catalog=store)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 50, heads, 32, generator=generator) for heads in (4, 2, 2))
    arguments = {"causal": True, "window_size": (6, 0) if scores else (-1, -1), "softcap": 3.0 if scores else 0.0}
    out, lse = catalog.flash_attn_func(q, k, v, **arguments, return_lse=True)
    assert catalog.last_decision().kernel_id == kernel, str(catalog.last_decision())
    assert catalog.loaded_kernels()[0]["probed"]
    with catalog.attention_kernel("sdpa"):
        expected, expected_lse = catalog.flash_attn_func(q, k, v, **arguments, return_lse=True)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)
    if not scores:
        views = (x.transpose(1, 2) for x in (q, k, v))
        served = catalog.scaled_dot_product_attention(*views, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(served.transpose(1, 2), out, rtol=1e-4, atol=1e-5)
        assert served.stride() == q.transpose(1, 2).stride() and catalog.stats()["outcomes"][f"hit:{kernel}"] == 2


def test_what_is_not_finite_stays_so_in_every_row_that_sees_it(tmp_path):
    """A row's answer is finite exactly where torch's is from the row's own keys; only rows beside the diagonal may have more."""
    store = catalog.open(tmp_path / "catalog", create=True)
    kernel = add(store, tmp_path, AttentionSpec(1, 1, 32, 32, 1, 60, 60, masks=(Rule.make("causal"),)))
    catalog.configure(catalog=store)
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(1, 1, 60, 32, generator=generator) for _ in range(3)]
    for which, number, row in itertools.product(range(3), (math.nan, math.inf, -math.inf), (0, 37, 59)):
        q, k, v = (x.clone() for x in plain)
        (q, k, v)[which][0, 0, row, 5] = number
        finite = torch.isfinite(catalog.scaled_dot_product_attention(q, k, v, is_causal=True))[0, 0].all(-1)
        assert catalog.last_decision().kernel_id == kernel
        with sdpa_kernel(SDPBackend.MATH):
            alone = [F.scaled_dot_product_attention(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]) for i in range(60)]
        expected = torch.tensor([bool(torch.isfinite(x).all()) for x in alone])
        more = torch.nonzero(finite != expected).flatten()
        told = f"{'qkv'[which]}[{row}] = {number}: other rows than torch's are not finite: {more.tolist()}"
        assert torch.equal(finite & expected, finite) and all(which == 2 and row - 32 < i < row for i in more), told
