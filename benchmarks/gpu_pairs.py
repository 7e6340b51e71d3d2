"""Every pair of mask, score rule, head dim, dtype, heads, lengths and target in some kernel, each judged by the verifier.

    python benchmarks/gpu_pairs.py [--json FILE] [--budget-s 200] [--workers 3] [--sanitize 6] [--skip 0] [--compile-only]

A cover of pairs keeps every two factors' values together at least once in about ninety kernels. Workers judge kernels in turn,
many in each process, as the devices of a farm do; a sample goes through compute-sanitizer too. Times nothing.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import multiprocessing as mp
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from gpu_cases import CAUSAL  # noqa: E402
from gpu_kernels import environment, log  # noqa: E402

from generator.authors.rules import RuleAuthor  # noqa: E402
from generator.spec import AttentionSpec, Rule  # noqa: E402
from generator.targets import find_target  # noqa: E402
from generator.translate import translate  # noqa: E402
from generator.translate.records import Launch, Translated  # noqa: E402
from generator.tuning import ordered_choices, with_choice  # noqa: E402
from verifier.children import Limits  # noqa: E402
from verifier.compile_cuda import compile_cuda  # noqa: E402
from verifier.records import Binary, Failed  # noqa: E402

START = time.monotonic()
CACHE = Path(os.environ.get("FARM_CUDA_CACHE", tempfile.gettempdir())) / "farm_gpu_pairs"
_SINK, _SOFTCAP, _ALIBI = Rule.make("sink_logit"), Rule.make("softcap", cap=20.0), Rule.make("alibi")
#: Factor -> its values by name.
FACTORS: dict[str, dict[str, Any]] = {
    "target": {name: name for name in ("sm_75", "sm_80", "sm_90a")},
    "dtype": {"fp16": "fp16", "bf16": "bf16"},
    "dims": {str(d): d for d in (40, 64, 72, 80, 96, 128, 160, 192, 256)},
    "dim of V": {"same": 0, "other": 1},
    "masks": {
        "full": (), "causal": CAUSAL, "causal top left": (Rule.make("causal", align="top_left"),),
        "window": (Rule.make("window", left=99),), "window both": (Rule.make("window", left=70, right=33),),
        "sink window": (Rule.make("sink_window", sink=5, left=80),), "prefix": (Rule.make("prefix", length=60),),
        "document": (Rule.make("document"),), "padding": (Rule.make("padding"),),
    },
    "scores": {
        "none": (), "softcap": (_SOFTCAP,), "alibi": (_ALIBI,), "sink logit": (_SINK,), "all": (_SOFTCAP, _ALIBI, _SINK),
    },
    "heads": {"4/4": (4, 4), "4/2": (4, 2), "6/2": (6, 2), "5/1": (5, 1)},
    "lengths": {"200x200": (200, 200), "77x333": (77, 333), "333x77": (333, 77), "1x513": (1, 513), "255x129": (255, 129)},
}  # fmt: skip
#: Another head dim of V, for each of Q and K.
OTHER_DIM = {40: 64, 64: 128, 72: 40, 80: 96, 96: 64, 128: 64, 160: 128, 192: 128, 256: 128}
Row = dict[str, str]


def impossible(row: Row) -> bool:
    return row.get("target") == "sm_75" and row.get("dtype") == "bf16"  # the card has no such instruction


def pairs_of(row: Row) -> frozenset[tuple[tuple[str, str], tuple[str, str]]]:
    return frozenset(itertools.combinations(sorted(row.items()), 2))


def cover(seed: int = 1, tries: int = 60) -> list[Row]:
    """Rows that hold every possible pair of values of two factors; each row is the best of some random ones. Always the same."""
    generator, values = random.Random(seed), {f: list(v) for f, v in FACTORS.items()}
    missing = {
        pair
        for (f, fv), (g, gv) in itertools.combinations(values.items(), 2)
        for a, b in itertools.product(fv, gv)
        for pair in pairs_of({f: a, g: b})
        if not impossible({f: a, g: b})
    }
    rows: list[Row] = []
    while missing:
        must = dict(generator.choice(sorted(missing)))
        drawn = ({f: must.get(f) or generator.choice(v) for f, v in values.items()} for _ in range(tries))
        row = max((r for r in drawn if not impossible(r)), key=lambda r: len(pairs_of(r) & missing))
        missing -= pairs_of(row)
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Case:
    """One kernel of the cover."""

    name: str
    target: str
    spec: AttentionSpec

    @staticmethod
    def of(row: Row) -> Case:
        chosen = {f: FACTORS[f][v] for f, v in row.items()}
        d = chosen["dims"]
        dv = OTHER_DIM[d] if chosen["dim of V"] else d
        (heads, kv_heads), (sq, sk) = chosen["heads"], chosen["lengths"]
        spec = AttentionSpec(heads, kv_heads, d, dv, 1, sq, sk, chosen["dtype"], chosen["masks"], chosen["scores"])
        return Case(" ".join(f"{v}" for v in row.values()), chosen["target"], spec)

    @property
    def arch(self) -> str:
        return "sm_90a" if self.target == "sm_90a" else "sm_90"


def built(case: Case) -> tuple[Binary, Launch] | str:
    """The first of the author's tile sizes that the target has code for; else why there is none."""
    target, why = find_target(case.target), "no choice"
    code = RuleAuthor().code(case.spec, case.target)
    for choice in ordered_choices(code, target, {}):
        translated = translate(with_choice(code, choice), target)
        if isinstance(translated, Translated):
            binary = compile_cuda(translated, CACHE, Limits(wall_s=150), arch=case.arch)
            return (binary, translated.launch) if isinstance(binary, Binary) else f"{binary.reason}: {binary.log[:300]}"
        why = f"{translated.reason}: {translated.message}"
    return why


def judged(case: Case, sanitized: bool, device: str = "cuda:0") -> dict[str, Any]:
    """The verdict as plain values. Whatever goes wrong here is a result of this kernel alone."""
    from verifier.cuda_sanitize import sanitize
    from verifier.judge import judge

    out: dict[str, Any] = {"case": case.name, "spec": str(case.spec), "target": case.target, "worker": os.getpid()}
    try:
        found = built(case)
        if isinstance(found, str):
            return out | {"verdict": found}
        binary, launch = found
        verdict = judge(binary, launch, case.spec, device=device)
        spilled = {"spill_bytes": binary.resources.get("spill_bytes"), "registers": binary.resources.get("registers")}
        if isinstance(verdict, Failed):
            return (
                out | spilled | {"verdict": verdict.reason, "input": verdict.witness.input_name, "why": verdict.witness.message}
            )
        out |= spilled | {"verdict": "ok", "inputs": len(verdict.cases), "seconds": round(verdict.verify_s, 2)}
        if sanitized:
            said = sanitize(binary, launch, case.spec, device)
            out["sanitizer"] = said.witness.message if isinstance(said, Failed) else said.words
        return out
    except Exception as error:  # noqa: BLE001 - a case that fails is a result
        return out | {"verdict": f"{type(error).__name__}: {str(error)[:300]}"}


def in_turn(cases: Sequence[Case], sample: int, workers: int, end: float) -> Iterator[dict[str, Any]]:
    """Each worker is one process that judges case after case; cases that the time does not reach are left out."""
    chosen = {case.name for case in cases[:: max(1, len(cases) // sample)]} if sample else set()
    with mp.get_context("spawn").Pool(workers) as pool:  # which ends its processes on leaving, whatever they do
        results = pool.imap_unordered(_judged, [(case, case.name in chosen) for case in cases])
        for _ in cases:
            try:
                yield results.next(max(0.01, end - time.monotonic()))
            except mp.TimeoutError:
                log("  out of time")
                return


def _judged(item: tuple[Case, bool]) -> dict[str, Any]:
    return judged(*item)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for every verdict")
    parser.add_argument("--budget-s", type=float, default=200)
    parser.add_argument("--workers", type=int, default=3, help="processes that judge; the device is shared by them")
    parser.add_argument("--sanitize", type=int, default=6, help="kernels that go through compute-sanitizer too")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first so many kernels, which an earlier run judged")
    parser.add_argument("--compile-only", action="store_true", help="fill the cache of binaries; needs no GPU")
    options = parser.parse_args()
    cases = [Case.of(row) for row in cover()][options.skip :]
    if options.compile_only:
        for number, case in enumerate(cases, 1):
            found = built(case)
            log(f"[{number}/{len(cases)}]", case.name, found if isinstance(found, str) else found[0].resources.get("spill_bytes"))
        return
    facts = environment() | {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    facts |= {"cases": len(cases), "skipped": options.skip}
    log(facts)
    found = []
    for row in in_turn(cases, options.sanitize, options.workers, START + options.budget_s):
        found.append(row)
        if row["verdict"] != "ok" or "sanitizer" in row:
            log("  " + " ".join(str(row[k]) for k in ("target", "spec", "verdict", "input", "why", "sanitizer") if k in row))
        if options.json:
            Path(options.json).write_text(json.dumps(facts | {"verdicts": found}, indent=1))
    right, turns = sum(r["verdict"] == "ok" for r in found), {r["worker"] for r in found}
    most = max((sum(r["worker"] == w for r in found) for w in turns), default=0)
    log(f"{right} of {len(found)} kernels pass, of {len(cases)} in the cover; up to {most} judged in turn by one process")


if __name__ == "__main__":
    main()
