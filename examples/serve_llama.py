"""Serve a small Llama with random weights through the catalog, and compare its logits with torch's own attention.

    python examples/serve_llama.py --catalog ./farm-catalog

Needs no download: the configuration is made here, the weights are random. Prints the largest difference of the logits, which
kernels ran, and why torch answered where none did. Without --catalog: FARM_CATALOG, else the user's default folder.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch

import catalog
from catalog.integrations.transformers import register

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    raise SystemExit("this example needs transformers: pip install transformers") from None


def make_model(attention: str, layers: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """The same random weights whatever the attention."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=heads * head_dim,
        intermediate_size=2 * heads * head_dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=8192,
        attn_implementation=attention,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


@torch.inference_mode()
def serve(model: LlamaForCausalLM, prompt: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Logits of the prompt, the tokens that follow it (greedy), seconds."""
    model(prompt)  # warm: kernels are loaded here
    started = time.perf_counter()
    logits = model(prompt).logits
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False)
    return logits, tokens, time.perf_counter() - started


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """The prompt's length is one of the default plan's, so that what `farm sweep` made without a plan serves it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--catalog", help="folder of the catalog")
    parser.add_argument("--seqlen", type=int, default=256, help="length of the prompt")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args(arguments)
    for name in ("seqlen", "batch", "heads", "kv_heads", "head_dim", "layers", "new_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected a whole number of at least 1, found {getattr(options, name)}")
    if options.heads % options.kv_heads:
        parser.error(f"--kv-heads: expected a divisor of --heads {options.heads}, found {options.kv_heads}")
    return options


def main() -> None:
    options = options_of()
    if options.catalog:
        try:
            catalog.configure(catalog=catalog.open(options.catalog))
        except ValueError as error:
            raise SystemExit(f"--catalog: {error}") from None
    warnings.simplefilter("ignore", catalog.FallbackWarning)  # the reasons are printed below
    register()
    shape = (options.layers, options.heads, options.kv_heads, options.head_dim, getattr(torch, options.dtype))
    prompt = torch.randint(1, 1000, (options.batch, options.seqlen), generator=torch.Generator().manual_seed(1))
    expected, expected_tokens, torch_s = serve(make_model("sdpa", *shape), prompt, options.new_tokens)
    logits, tokens, ours_s = serve(make_model("farm", *shape), prompt, options.new_tokens)

    difference = (logits - expected).abs().max().item()
    print(f"largest difference of logits: {difference:.2e} (logits up to {expected.abs().max().item():.1f})")
    print(f"tokens equal: {torch.equal(tokens, expected_tokens)}")
    print(f"seconds: farm {ours_s:.3f}, sdpa {torch_s:.3f}")
    stats = catalog.stats()
    print(f"attention calls: {stats['calls']}")
    for label, count in stats["outcomes"].items():
        print(f"  {label}: {count}")
    if (last := catalog.last_decision()) is not None:
        print(f"the last decision:\n  {last}")


if __name__ == "__main__":
    main()
