"""The paper's table for this machine's GPU: variant x head dim x length x causal, ours beside cuDNN and the official library.

    python benchmarks/paper_table.py [--json FILE] [--budget-s 100] [--dtype bf16] [--variants MHA,GQA] [--lengths 512,1024]
    python benchmarks/paper_table.py --compile [--target sm_90a]        # only the kernels; needs no GPU

As in the paper (arXiv 2506.12355), a cell has 16,384 tokens and 2,048 = heads x head dim of V. The official library is
FlashAttention-2 as torch builds it; where it refuses, torch's memory-efficient kernel stands in, marked `*`. Tile sizes of ours
and one hint are searched by measured halving; every cell is compared with float64 on sampled rows; calls alternate on a card at
work. No farm and no catalog.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import gpu_cases as cases  # noqa: E402
from gpu_cells import Cell  # noqa: E402
from gpu_kernels import Kernel, environment, log, place_of  # noqa: E402
from gpu_prefill import RMS_LIMIT  # noqa: E402
from gpu_search import Built, Effort, candidates, compile_every, winners_of, with_hints  # noqa: E402
from gpu_timing import in_turns, input_sets, sampled_error, streamed  # noqa: E402

from generator.spec import AttentionSpec  # noqa: E402
from generator.targets import TARGETS  # noqa: E402

START = time.monotonic()
TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
#: Variant -> (query heads of a key head at a number of heads, (head dim, head dim of V)...).
VARIANTS: dict[str, tuple[Any, tuple[tuple[int, int], ...]]] = {
    "MHA": (lambda heads: 1, ((64, 64), (128, 128))),
    "GQA": (lambda heads: 8, ((64, 64), (128, 128))),
    "MQA": (lambda heads: heads, ((64, 64), (128, 128))),
    "MLA": (lambda heads: 1, ((192, 128),)),
}
OFFICIAL, STAND_IN = "flash", "efficient"


@dataclass(frozen=True)
class Line:
    """One line of the table, for all lengths."""

    variant: str
    head_dim: int
    head_dim_v: int
    causal: bool

    @property
    def name(self) -> str:
        dims = f"d{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim != self.head_dim_v else "")
        return f"{self.variant} {dims} {'causal' if self.causal else 'full'}"

    def spec(self, dtype: str, seqlen: int) -> AttentionSpec:
        heads = WIDTH // self.head_dim_v
        group = VARIANTS[self.variant][0](heads)
        made = cases.spec(dtype, self.head_dim, self.head_dim_v, cases.CAUSAL if self.causal else ())
        return cases.sized(made, max(1, TOKENS // seqlen), heads, heads // group, seqlen, seqlen)


def lines(variants: Sequence[str]) -> list[Line]:
    return [Line(v, d, dv, causal) for v in variants for d, dv in VARIANTS[v][1] for causal in (False, True)]


def target_here() -> str:
    """The newest target whose own card this is, asked of NVML, since this process forks. SystemExit where there is none."""
    from farm.devices import targets_of
    from verifier.gpu import NoDevice, capability_of

    try:
        capability = capability_of("cuda:0")
    except NoDevice as error:
        raise SystemExit(f"no GPU here: {error}") from None
    own, _ = targets_of(*capability)
    if not own:
        found = f"{capability[0]}.{capability[1]}"
        raise SystemExit(f"no target is written for compute capability {found}; there are {', '.join(TARGETS)}")
    return own[-1]


def time_all(s: AttentionSpec, ours: Built, rounds: int, heat_s: float) -> dict[str, Any]:
    """Milliseconds of ours and of the rivals on the same inputs, call by call in turn, and our error on sampled rows."""
    import torch

    torch.cuda.empty_cache()
    sets = input_sets(torch, s, 2)
    kernel = Kernel(ours[1], ours[2])
    calls: dict[str, list[Any]] = {"ours": [kernel.prepared(s, x) for x in sets]}
    unsupported: dict[str, str] = {}
    for name in ("cudnn", OFFICIAL, STAND_IN):
        if name == STAND_IN and OFFICIAL in calls:
            continue
        found = [cases.rivals(torch, s, x["q"], x["k"], x["v"], (name,)) for x in sets]
        unsupported |= found[0].unsupported
        if all(r.calls for r in found):
            calls[name] = [r.calls[name] for r in found]
    times = in_turns(torch, calls, rounds, heat_s)
    return {"kernel": ours[0], "ms": times, "rms": sampled_error(torch, s, sets[0]), "unsupported": unsupported}


def cell_of(line: Line, s: AttentionSpec, result: Any) -> dict[str, Any]:
    """One cell as plain values: TFLOP/s of everybody, our ratios, and whether ours was right."""
    out: dict[str, Any] = {"variant": line.variant, "head_dim": line.head_dim, "head_dim_v": line.head_dim_v,
                           "causal": line.causal, "seqlen": s.seqlen_q, "batch": s.batch, "num_heads": s.num_heads,
                           "num_kv_heads": s.num_kv_heads, "dtype": s.dtype}  # fmt: skip
    if isinstance(result, str):
        return out | {"error": result}
    work = cases.flops(s, cases.visible_pairs(s)) / 1e9
    ms = {name: statistics.median(times) for name, times in result["ms"].items()}
    official = next((n for n in (OFFICIAL, STAND_IN) if n in ms), None)
    out |= {"kernel": result["kernel"], "ms": ms, "tflops": {n: round(work / t, 1) for n, t in ms.items()}}
    out |= {"rms": result["rms"], "right": result["rms"] <= RMS_LIMIT[s.dtype], "unsupported": result["unsupported"]}
    out["to_cudnn"] = round(ms["cudnn"] / ms["ours"], 3) if "cudnn" in ms else None
    return out | {"official": official, "to_official": round(ms[official] / ms["ours"], 3) if official else None}


def printed(found: Sequence[dict[str, Any]], lengths: Sequence[int]) -> list[str]:
    """For each line: TFLOP/s of the three, then our ratio to each."""
    by_place = {(c["variant"], c["head_dim"], c["causal"], c["seqlen"]): c for c in found}
    out = [f"{'TFLOP/s':28s}" + "".join(f"{n:>10d}" for n in lengths)]
    places = dict.fromkeys((c["variant"], c["head_dim"], c["head_dim_v"], c["causal"]) for c in found)
    for variant, d, dv, causal in places:
        own = [by_place.get((variant, d, causal, n)) for n in lengths]
        name = Line(variant, d, dv, causal).name
        out.append(f"{name + ' ours':28s}" + "".join(_number(c, lambda c: c["tflops"]["ours"], "6.0f") for c in own))
        out.append(f"{'  x cuDNN':28s}" + "".join(_number(c, lambda c: c["to_cudnn"], "6.2f") for c in own))
        mark = "*" if any(c and c.get("official") == STAND_IN for c in own) else ""
        out.append(f"{'  x FlashAttention-2' + mark:28s}" + "".join(_number(c, lambda c: c["to_official"], "6.2f") for c in own))
    if any(c.get("official") == STAND_IN for c in found):
        out.append("* it refuses these: torch's memory-efficient kernel instead")
    for name, what in (("cuDNN", "to_cudnn"), ("FlashAttention-2 or its stand-in", "to_official")):
        ratios = [c[what] for c in found if c.get(what)]
        if ratios:
            mean, ends = math.exp(statistics.fmean(map(math.log, ratios))), f"worst {min(ratios):.3f}, best {max(ratios):.3f}"
            out.append(f"to {name}: geometric mean {mean:.3f}, {ends} of {len(ratios)} cells")
    out += [f"no time: {c['variant']} d{c['head_dim']} {c['seqlen']}: {c['error'][:200]}" for c in found if "error" in c]
    wrong = [c for c in found if c.get("right") is False]
    return out + [f"WRONG: {c['variant']} d{c['head_dim']} {c['seqlen']}: rms {c['rms']:.1e}" for c in wrong]


def _number(cell: dict[str, Any] | None, of: Any, form: str) -> str:
    value = of(cell) if cell and "error" not in cell else None
    return f"{'-' if value is None else format(value, form):>10s}"


def chosen(text: str, allowed: Sequence[str], flag: str) -> list[str]:
    words = text.split(",")
    for word in words:
        if word not in allowed:
            raise SystemExit(f"{flag}: expected some of {', '.join(allowed)}, found {word!r}")
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for every number")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--dtype", help="bf16 or fp16; default: bf16 where the card has it")
    parser.add_argument("--candidates", type=int, default=4, help="choices of tile sizes for each kind of call")
    parser.add_argument("--rounds", type=int, default=12, help="timed calls of each contestant in a cell")
    parser.add_argument("--hints", type=int, default=2, help="hints tried with the best tile sizes of each kind of call")
    parser.add_argument("--heat-s", type=float, default=0.1, help="seconds of turns before the timed ones")
    parser.add_argument("--budget-s", type=float, default=100)
    parser.add_argument("--target", choices=[t for t in TARGETS if t != "cpu"], help="with --compile (default: of the card here)")
    parser.add_argument("--compile", action="store_true", help="only build the kernels")
    options = parser.parse_args()
    import torch  # noqa: F401 - before children fork; touches no device

    lengths = [int(n) for n in chosen(options.lengths, [str(n) for n in LENGTHS], "--lengths")]
    variants = chosen(options.variants, list(VARIANTS), "--variants")
    target = (options.compile and options.target) or target_here()
    dtype = options.dtype or ("bf16" if "bf16" in TARGETS[target].dtypes else "fp16")
    chosen(dtype, [d for d in ("bf16", "fp16") if d in TARGETS[target].dtypes or d == "fp16"], "--dtype")
    facts = environment() | {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "target": target}
    facts |= {"arguments": {name: value for name, value in vars(options).items() if name != "json"}}
    log(facts)
    if options.compile:
        log(f"{compile_only(wanted_cells(target, dtype, variants, lengths), options)} kinds built")
        return
    table = run(target, dtype, variants, lengths, options)
    if options.json:
        Path(options.json).write_text(json.dumps(facts | {"cells": table}, indent=1))
    print("\n".join(printed(table, lengths)), flush=True)


def wanted_cells(target: str, dtype: str, variants: Sequence[str], lengths: Sequence[int]) -> list[tuple[Line, Cell]]:
    """Middle lengths first, so that a short run says something of each line."""
    order = sorted(lengths, key=lambda n: abs(math.log2(n) - 11.1))
    return [(line, Cell("paper", target, line.spec(dtype, n), "cudnn")) for n in order for line in lines(variants)]


def compile_only(wanted: Sequence[tuple[Line, Cell]], options: argparse.Namespace) -> int:
    """Builds what a search would ask for, every hint with every choice of tile sizes; the number of kinds of calls."""
    kinds = dict.fromkeys(cell.kind for _, cell in wanted)
    tiles = [b for kind in kinds for b in candidates(kind, options.candidates)]
    built = list(compile_every(tiles))
    compile_every([b for first in built for b in with_hints(first, options.hints)])
    return len(kinds)


def run(target: str, dtype: str, variants: list[str], lengths: list[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Kernels built and searched, then every cell timed."""
    wanted = wanted_cells(target, dtype, variants, lengths)
    end = START + options.budget_s
    effort = Effort(options.candidates, options.hints, options.heat_s, START + options.budget_s / 3, START + options.budget_s / 2)
    winners, _ = winners_of([cell for _, cell in wanted], effort, place_of(environment()), ())
    log("timing")

    def work(item: tuple[Line, Cell]) -> Any:
        cell = item[1]
        return time_all(cell.spec, winners[cell.job], options.rounds, options.heat_s)

    ready = [item for item in wanted if item[1].job in winners]
    found = [cell_of(line, cell.spec, result) for (line, cell), result in streamed(work, ready, 40, end - 2)]
    log(f"{len(found)} of {len(wanted)} cells")
    rank = {line: i for i, line in enumerate(lines(variants))}
    return sorted(found, key=lambda c: (rank[Line(c["variant"], c["head_dim"], c["head_dim_v"], c["causal"])], c["seqlen"]))


if __name__ == "__main__":
    main()
