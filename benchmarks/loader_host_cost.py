"""What a call costs on the host beyond the kernel: ours, a plan's, a fallback's and torch's own, on a problem of one row.

    python benchmarks/loader_host_cost.py --out benchmarks/results/loader_host_cost_1.json

Calls alternate in short rounds, shorter than a slice of the scheduler; figures are quantiles over rounds of the mean of a round,
in microseconds. The kernel is a real one, written by the rule author for 1 x 1 with head dimension 16; "the kernel alone" is its
call on a prepared argument block, to be taken off the others. Single-threaded. Judges nothing: the bars are torch's own plus 3 us
for a function call, and 6 us for `plan.run(out=)`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import catalog
from catalog import attention, serving
from catalog.frames import BoundKernel
from catalog.operands import sdpa_output
from catalog.schema import make_row
from generator.authors.rules import RuleAuthor
from generator.canonical import digest_text
from generator.spec import AttentionSpec
from generator.targets import TARGETS
from generator.tl.fill import fill, hole_choices
from generator.translate import translate
from verifier.compile import compile_translated
from verifier.environment import device_key, environment
from verifier.launch import CallBlock

LSE = torch.empty(1)
SPEC = AttentionSpec(1, 1, 16, 16, 1, 1, 1, name="host cost")


def make_catalog(folder: Path) -> None:
    """One kernel. Its row says that it was measured, so that it is chosen: times here are not about speed."""
    program = RuleAuthor().code(SPEC, "cpu")
    translated = translate(fill(program, next(iter(hole_choices(program)))), TARGETS["cpu"])
    binary = compile_translated(translated, folder / "builds")
    with open(binary.path, "rb") as file:
        data = file.read()
    store = catalog.open(folder / "catalog", create=True)
    row = make_row(
        attempt_key=digest_text("host cost"), reason_code="ok", spec=SPEC, target="cpu", translator_version="-",
        harness_version="-", device_key=device_key().hash, source_hash=translated.hash, rule_id="-",
        binary_hash=store.artifacts.put(data), launch=translated.launch,
        verified_shapes=[(1, 1, 1), (2, 37, 53)], p50_s=1e-6, baseline_p50_s=1e-3,
    )  # fmt: skip
    with store.writer("host-cost") as writer:
        writer.append(row)


def prepared_block(x: torch.Tensor, out: torch.Tensor) -> CallBlock:
    """Arguments of the kernel's call with nothing left to fill in."""
    call = attention.describe("scaled_dot_product_attention", x, x, x)
    bound = BoundKernel(serving.loader.all()[0].entry, call, SPEC, sdpa_output(x, 16), {})
    block, _ = bound.new_block()
    names = [t.name for t in bound.kernel.launch.tensors]
    block.set_pointers([{"O": out, "LSE": LSE}.get(name, x).data_ptr() for name in names])
    return block


def contestants() -> dict[str, Callable[[], Any]]:
    """Name -> one call."""
    sdpa, ours = torch.nn.functional.scaled_dot_product_attention, catalog.scaled_dot_product_attention
    x, y, z = (torch.randn(1, 1, 1, 16) for _ in range(3))
    out, packed, others = torch.empty_like(x), [t.transpose(1, 2) for t in (x, y, z)], [t.double() for t in (x, y, z)]
    plan = catalog.plan(ours, x, y, z)
    ours(x, y, z)
    decision = catalog.last_decision()
    assert decision is not None and decision.kernel_id is not None, str(decision)
    block = prepared_block(x, out)
    kernel = serving.loader.all()[0].entry
    return {
        "the kernel alone": lambda: kernel.run(block),
        "torch sdpa": lambda: sdpa(x, y, z),
        "scaled_dot_product_attention": lambda: ours(x, y, z),
        "plan.run(out=)": lambda: plan.run(x, y, z, out=out),
        "flash_attn_func": lambda: catalog.flash_attn_func(*packed),
        "torch sdpa, fp64": lambda: sdpa(*others),
        "scaled_dot_product_attention, fp64 (fallback)": lambda: ours(*others),
    }


def measure(calls: dict[str, Callable[[], Any]], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Microseconds a call, one figure a round."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            for _ in range(repeats):
                call()
            found[name].append((time.perf_counter() - started) / repeats * 1e6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--out", type=Path, help="JSON with every round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", catalog.FallbackWarning)
    with tempfile.TemporaryDirectory() as folder:
        make_catalog(Path(folder))
        catalog.configure(catalog=Path(folder) / "catalog")
        found = measure(contestants(), options.rounds, options.repeats)
    for name, samples in found.items():
        tenth, median = statistics.quantiles(samples, n=10)[0], statistics.median(samples)
        print(f"{name:48} least {min(samples):6.2f}, a tenth below {tenth:6.2f}, median {median:6.2f} us")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(
            json.dumps(
                {
                    "environment": environment(),
                    "microseconds": {name: [round(x, 3) for x in samples] for name, samples in found.items()},
                },
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
