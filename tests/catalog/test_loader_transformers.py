"""The transformers integration on random weights: logits agree with sdpa's and eager's, and kernels run where masks are rules."""

import runpy
import sys

import pytest
import torch
from kernel_factory import CAUSAL_BR, Shelf, spec

transformers = pytest.importorskip("transformers")

import catalog  # noqa: E402
from catalog.integrations.transformers import _window_of, register  # noqa: E402
from catalog.keys import ShapeBucket  # noqa: E402
from farm.plan_file import load_plan  # noqa: E402
from generator.spec import Rule  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_loader")
register()

SMALL = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip
WINDOW = (Rule.make("window", left=7, right=0),)


def serve(*families):
    shelf = Shelf()
    buckets = [(q, k) for q in (1, 8, 16, 32) for k in (8, 16, 32, 64)]
    for family in families:
        shelf.add(spec(batch=2, heads=4, kv_heads=2, **family), buckets=buckets)
    catalog.configure(catalog=shelf.source(), probe="off", allow_unmeasured=True)


def model(kind, attention, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **more)
    config._attn_implementation = attention
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def tokens(length, batch=2):
    return torch.randint(1, 99, (batch, length), generator=torch.Generator().manual_seed(length))


def hits():
    return sum(n for label, n in catalog.stats()["outcomes"].items() if label.startswith("hit:"))


@torch.inference_mode()
def logits(kind, attention, prompt, mask=None, **more):
    return model(kind, attention, **more)(prompt, attention_mask=mask).logits


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_prefill_and_decode_of_a_llama():
    serve({}, {"masks": CAUSAL_BR})
    prompt = tokens(20)
    close(logits("Llama", "farm", prompt), logits("Llama", "sdpa", prompt))
    assert catalog.stats()["calls"] == hits() == 2
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(model("Llama", "farm").generate(prompt, **options), model("Llama", "sdpa").generate(prompt, **options))
    assert catalog.stats()["calls"] == hits() == 14


def test_a_second_chunk_of_a_prompt_is_aligned_to_its_end():
    serve({"masks": CAUSAL_BR})
    prompt = tokens(30)
    ours, theirs = model("Llama", "farm"), model("Llama", "eager")
    with torch.inference_mode():
        cache = ours(prompt[:, :18], use_cache=True).past_key_values
        found = ours(prompt[:, 18:], past_key_values=cache).logits
        close(found, theirs(prompt).logits[:, 18:])
    assert hits() == 4


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_goes_to_torch_and_stays_right(side):
    serve({"masks": CAUSAL_BR})
    prompt, mask = tokens(20), torch.ones(2, 20, dtype=torch.long)
    if side == "left":
        mask[0, :6] = 0
    else:
        mask[0, -6:] = 0
    found, expected = logits("Llama", "farm", prompt, mask), logits("Llama", "eager", prompt, mask)
    close(found[mask.bool()], expected[mask.bool()])
    assert hits() == 0 and set(catalog.stats()["outcomes"]) == {"miss:mask_tensor"}


@pytest.mark.parametrize("kind", ["Mistral", "Qwen2"])
def test_sliding_windows(kind):
    serve({"masks": CAUSAL_BR}, {"masks": WINDOW})
    more = {"sliding_window": 8, **({"use_sliding_window": True, "max_window_layers": 1} if kind == "Qwen2" else {})}
    prompt = tokens(30)
    close(logits(kind, "farm", prompt, **more), logits(kind, "eager", prompt, **more))
    assert hits() == 2 and len(catalog.stats()["outcomes"]) == (1 if kind == "Mistral" else 2)
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    ours, theirs = (model(kind, name, **more).generate(prompt, **options) for name in ("farm", "eager"))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("padded", [False, True])
def test_softcap_and_windows_in_turn(padded):
    capped = {"scores": (Rule.make("softcap", cap=5.0),)}
    serve({"masks": CAUSAL_BR, **capped}, {"masks": WINDOW, **capped})
    more = {"sliding_window": 8, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}
    prompt, mask = tokens(30), torch.ones(2, 30, dtype=torch.long)
    if padded:
        mask[1, :9] = 0
    found, expected = (logits("Gemma2", name, prompt, mask, **more) for name in ("farm", "eager"))
    close(found[mask.bool()], expected[mask.bool()])
    assert hits() == (0 if padded else 2)


@pytest.mark.parametrize("padded", [False, True])
def test_sink_logits(padded):
    sink = {"scores": (Rule.make("sink_logit"),)}
    serve({"masks": CAUSAL_BR, **sink}, {"masks": WINDOW, **sink})
    more = {"sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    prompt, mask = tokens(30), torch.ones(2, 30, dtype=torch.long)
    if padded:
        mask[1, :9] = 0
    found, expected = (logits("GptOss", name, prompt, mask, **more) for name in ("farm", "eager"))
    close(found[mask.bool()], expected[mask.bool()])
    assert hits() == (0 if padded else 2)


def test_a_static_cache():
    serve({"masks": CAUSAL_BR})
    prompt = tokens(20)
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    options["attention_mask"] = torch.ones_like(prompt)
    assert torch.equal(model("Llama", "farm").generate(prompt, **options), model("Llama", "sdpa").generate(prompt, **options))


def test_gradients_reach_the_weights():
    serve({"masks": CAUSAL_BR})
    ours, theirs = model("Llama", "farm"), model("Llama", "sdpa")
    for m in (ours, theirs):
        m(tokens(12), labels=tokens(12)).loss.backward()
    close(ours.model.layers[0].self_attn.q_proj.weight.grad, theirs.model.layers[0].self_attn.q_proj.weight.grad)
    assert set(catalog.stats()["outcomes"]) == {"miss:requires_grad"}


def test_which_masks_are_windows():
    from transformers import masking_utils as masks

    window = masks.sliding_window_causal_mask_function(8)
    assert _window_of(window) == 8 and _window_of(masks.causal_mask_function) is None
    assert _window_of(masks.and_masks(window, masks.causal_mask_function)) is None
    assert _window_of(masks.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long))) is None
    assert _window_of(masks.sliding_window_bidirectional_mask_function(8)) is None


def test_the_example_runs(monkeypatch, capsys, tmp_path):
    shelf = Shelf()
    for family in ({}, {"masks": CAUSAL_BR}):
        shelf.add(spec(heads=4, kv_heads=2, **family), buckets=[(32, 32), (1, 32)], ours_s=1e-9)
    arguments = ["--catalog", str(shelf.save(tmp_path / "catalog")), "--seqlen", "24", "--heads", "4", "--kv-heads", "2"]
    monkeypatch.setattr(sys, "argv", ["serve_llama.py", *arguments, "--head-dim", "16", "--new-tokens", "3"])
    runpy.run_path("examples/serve_llama.py", run_name="__main__")
    told = capsys.readouterr().out
    assert "tokens equal: True" in told and float(told.split("logits: ")[1].split()[0]) < 1e-4
    assert "hit:" in told, told


def test_the_example_asks_for_what_the_default_plan_makes():
    """A newcomer runs `make sweep` and then the example: a kernel has to answer there, not torch."""
    asked = runpy.run_path("examples/serve_llama.py")["options_of"]([])
    plan = {
        (s.num_heads, s.num_kv_heads, s.head_dim, s.dtype, ShapeBucket.of_spec(s), str(s.masks[0]))
        for s in load_plan().specs()
        if s.masks
    }  # noqa: E501
    bucket = ShapeBucket.of(asked.batch, asked.seqlen, asked.seqlen)
    assert (asked.heads, asked.kv_heads, asked.head_dim, "fp32", bucket, "causal(align=bottom_right)") in plan
    for wrong in (["--seqlen", "0"], ["--heads", "5", "--kv-heads", "2"]):
        with pytest.raises(SystemExit):
            runpy.run_path("examples/serve_llama.py")["options_of"](wrong)
