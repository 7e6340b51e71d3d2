"""Which kernels spill registers: head sizes x dtypes x variants x CUDA targets, compiled here. Needs no GPU and runs nothing.

    python benchmarks/spills.py --out FILE.json [--targets sm_75,sm_80,sm_90a] [--choices 1] [--workers 2]

Every kernel is built with the author's first tile sizes that fit (`--choices N`: the first N), for the target itself and not for
the card that may check it. The table lists those that spill: bytes of stores and loads, as ptxas counts them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import gpu_cases as cases  # noqa: E402
from gpu_cases import Build, Rule, spec  # noqa: E402

from generator.authors.rules import RuleAuthor  # noqa: E402
from generator.targets import TARGETS  # noqa: E402
from generator.translate.records import Translated  # noqa: E402
from generator.tuning import ordered_choices  # noqa: E402
from verifier.children import Limits  # noqa: E402
from verifier.compile_cuda import compile_cuda  # noqa: E402
from verifier.records import Binary  # noqa: E402

DIMS = ((32, 32), (40, 40), (64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256))
VARIANTS: dict[str, tuple[tuple[Rule, ...], tuple[Rule, ...]]] = {
    "full": ((), ()),
    "causal": (cases.CAUSAL, ()),
    "window": ((Rule.make("window", left=1023),), ()),
    "document+softcap": ((Rule.make("document"),), (Rule.make("softcap", cap=20.0),)),
}


def builds(target: str, choices: int) -> Iterator[Build]:
    for dtype in ("fp16",) if target == "sm_75" else ("bf16", "fp16"):
        for d, dv in DIMS:
            for masks, scores in VARIANTS.values():
                s = spec(dtype, d, dv, masks, scores)
                for c in ordered_choices(RuleAuthor().code(s, target), TARGETS[target], {})[:choices]:
                    yield Build(s, target, tuple(sorted(c.items())))


def spilled(b: Build, cache: Path) -> dict[str, Any]:
    """A row: what the compiler says, or why there is no kernel."""
    row: dict[str, Any] = {"kernel": b.name, "target": b.target}
    translated = b.translated()
    if not isinstance(translated, Translated):
        return row | {"error": translated.message}
    binary = compile_cuda(translated, cache, Limits(wall_s=300))
    if not isinstance(binary, Binary):
        return row | {"error": binary.reason}
    return row | {k: binary.resources[k] for k in ("registers", "spill_bytes", "shared_bytes")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="file for all rows")
    parser.add_argument("--targets", default="sm_75,sm_80,sm_90a")
    parser.add_argument("--choices", type=int, default=1, help="choices of tile sizes of each kernel")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cache", default=str(Path(tempfile.gettempdir()) / "farm_spills"))
    options = parser.parse_args()
    wanted = [b for t in options.targets.split(",") for b in builds(t, options.choices)]
    with ThreadPoolExecutor(options.workers) as pool:
        rows = list(pool.map(lambda b: spilled(b, Path(options.cache)), wanted))
    Path(options.out).write_text(json.dumps(rows, indent=1))
    for target in options.targets.split(","):
        of = [r for r in rows if r["target"] == target]
        bad = [r for r in of if r.get("spill_bytes")]
        print(f"{target}: {len(bad)} of {len(of)} kernels spill, {sum('error' in r for r in of)} were not built")
        for r in sorted(bad, key=lambda r: -r["spill_bytes"]):
            print(f"  {r['spill_bytes']:5d} bytes  {r['kernel']}")


if __name__ == "__main__":
    main()
