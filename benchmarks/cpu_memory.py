"""Peak memory of a call beyond its inputs, by sequence length: our CPU kernel and torch SDPA. Times nothing.

Causal, 1 x 32/8 heads, head dimension 128. Each figure is of a process of its own, whose peak of resident memory is reset right
before its first call and read right after it; the output and what the kernel keeps for its next call are in it.

    python benchmarks/cpu_memory.py [--dtype bf16] [--lengths 1024 2048 4096 8192]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from cpu_prefill import our_call
from cpu_rivals import CASES, Inputs, rivals

from generator.authors.rules import RuleAuthor
from generator.targets import find_target
from generator.tuning import ordered_choices
from verifier.environment import cache_bytes, cpu_flags, environment

CONTESTANTS = ("ours", "SDPA")


def peak_kib() -> int:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def child(contestant: str, dtype: str, length: int) -> int:
    """KiB by which the first call raised the peak."""
    import torch

    case = next(c for c in CASES if c.name == "causal 2048 d128").with_dtype(dtype)
    case = replace(case, spec=replace(case.spec, seqlen_q=length, seqlen_k=length))
    inputs = Inputs.random(case.spec)
    if contestant == "ours":
        target = find_target("cpu", cpu_flags())
        holes = ordered_choices(RuleAuthor().code(case.spec, target.name), target, cache_bytes())[0]
        call = our_call(case, inputs, holes, target)
    else:
        call = rivals(case, inputs, flex=False)[0]["SDPA"]
    torch.randn(256, 256) @ torch.randn(256, 256)  # torch's threads and their stacks exist from here on
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_kib()
    with torch.no_grad():
        call()
    return peak_kib() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", choices=CONTESTANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(child(args.child, args.dtype, args.lengths[0]))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[int, int]] = {c: {} for c in CONTESTANTS}
    for length in args.lengths:
        for contestant in CONTESTANTS:
            command = [sys.executable, __file__, "--child", contestant, "--dtype", args.dtype, "--lengths", str(length)]
            found[contestant][length] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        shown = ", ".join(f"{c} {found[c][length] / 1024:.1f} MiB" for c in CONTESTANTS)
        print(f"{args.dtype} {length:6} tokens: {shown}", flush=True)
    record = {"dtype": args.dtype, "peak_kib": found, "environment": environment()}
    file = args.out / f"cpu_memory-{args.dtype}.json"
    file.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    print(f"written: {file}")


if __name__ == "__main__":
    main()
