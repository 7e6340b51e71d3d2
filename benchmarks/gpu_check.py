"""Compiles, checks against float64 and times the CUDA translator's kernels on this machine's GPU. No failing case stops another.

    python benchmarks/gpu_check.py --out FILE.json [--phases smoke,check,bits,tune90,bench90,...] [--budget-s 540]

Every case runs in a child of its own with a time limit. The table comes last; the file has every number.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import gpu_cases as cases  # noqa: E402
from gpu_cases import Build, build, spec  # noqa: E402
from gpu_kernels import START, Kernel, compile_all, environment, in_child, log  # noqa: E402
from gpu_values import check, same_bits  # noqa: E402

from generator.spec import AttentionSpec  # noqa: E402
from generator.translate.records import Translated  # noqa: E402
from verifier.records import Binary  # noqa: E402


def time_group(
    s: AttentionSpec, ours: list[tuple[str, Translated, Binary]], wanted: tuple[str, ...], seconds: float
) -> dict[str, Any]:
    """Median milliseconds of each contestant, calls alternating; TFLOP/s over visible pairs."""
    import torch

    q, k, v, o = cases.random_qkv(torch, s)
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "o": o,
        "lse": torch.empty((s.batch, s.num_heads, s.seqlen_q), device="cuda"),
        **cases.captured(torch, s),
    }
    calls: dict[str, Callable[[], Any]] = {}
    unsupported: dict[str, str] = {}
    for name, translated, binary in ours:
        try:
            calls[name] = Kernel(translated, binary).prepared(s, tensors)
            calls[name]()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - a kernel that cannot be called is a finding
            calls.pop(name, None)
            unsupported[name] = f"{type(error).__name__}: {str(error)[:200]}"
    other = cases.rivals(torch, s, q, k, v, wanted)
    difference = {}
    if other.calls:
        reference = next(iter(other.calls.values()))().float()
        for name in list(calls):
            calls[name]()
            difference[name] = float((o.float() - reference).norm() / reference.norm())
    calls |= other.calls
    samples = alternate(torch, calls, seconds)
    work = cases.flops(s, cases.visible_pairs(s))
    tflops = {n: work / sorted(t)[len(t) // 2] / 1e9 for n, t in samples.items()}
    return {"tflops": tflops, "ms": samples, "unsupported": unsupported | other.unsupported, "difference": difference}


def alternate(torch: Any, calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of single calls, contestants taking turns, queued ahead so that the device never waits for the host."""
    for call in calls.values():
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    begin = time.monotonic()
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    rounds = int(max(7, min(60, seconds / max(1e-4, time.monotonic() - begin))))
    events = {n: [] for n in calls}  # type: ignore[var-annotated]
    for i in range(rounds):
        for n, call in calls.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            call()
            b.record()
            events[n].append((a, b))
        if i % 8 == 7:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return {n: [a.elapsed_time(b) for a, b in pairs] for n, pairs in events.items()}


class Session:
    """What has been built and found so far."""

    def __init__(self, budget_s: float, out: str) -> None:
        self.budget_s, self.out = budget_s, out
        self.built: dict[Build, tuple[dict[str, Any], Translated | None, Binary | None]] = {}
        self.results: dict[str, Any] = {"builds": {}, "checks": {}, "bits": {}, "times": []}
        self.failed: set[Build] = set()
        self.table: list[str] = []

    @property
    def left(self) -> float:
        return self.budget_s - (time.monotonic() - START)

    def compile(self, builds: Sequence[Build]) -> None:
        new = [b for b in dict.fromkeys(builds) if b not in self.built]
        if not new:
            return
        log(f"compiling {len(new)} kernels")
        self.built |= compile_all(new)
        self.results["builds"] |= {b.name: self.built[b][0] for b in new}
        self.save()

    def ready(self, builds: Sequence[Build]) -> list[tuple[str, Translated, Binary]]:
        out = []
        for b in builds:
            _, translated, binary = self.built[b]
            if translated is not None and binary is not None and b not in self.failed:
                out.append((b.name, translated, binary))
        return out

    def save(self) -> None:
        Path(self.out).write_text(json.dumps(self.results | {"table": self.table, "seconds": time.monotonic() - START}, indent=1))

    def say(self, line: str) -> None:
        self.table.append(line)
        log(line)

    def check(self, builds: Sequence[Build]) -> None:
        self.compile(builds)

        def one(b: Build) -> tuple[Build, dict[str, Any]]:
            row, translated, binary = self.built[b]
            if binary is None or translated is None:
                return b, {"error": row["error"]}
            return b, in_child(90, check, b, translated, binary) if self.left > 20 else {"error": "out of time"}

        with ThreadPoolExecutor(6) as pool:
            for b, outcome in pool.map(one, builds):
                self._checked(b, outcome)
        passed = [b for b in builds if b not in self.failed]
        self.say(f"checks: {len(passed)} of {len(builds)} kernels pass")
        self.save()

    def _checked(self, b: Build, outcome: dict[str, Any]) -> None:
        self.results["checks"][b.name] = outcome
        if "error" in outcome:
            self.failed.add(b)
            log("  FAILED", b.name, outcome["error"])
            return
        r = outcome["result"]
        views = [n for n, v in r["views"].items() if "error" in v or v["nan"] or v["rms"] > 8e-3]
        good = not r["bad"] and not r["differing_reruns"] and not views
        numbers = f"rms {r['rms']:.1e} lse {r['lse']:.1e} reruns {r['differing_reruns']} regs {r['attributes']['registers']}"
        log(f"  {'ok ' if good else 'BAD'} {b.name} {numbers}")
        if not good:
            self.failed.add(b)
            for line in [*r["bad"][:3], *(f"view {n}: {r['views'][n]}" for n in views)]:
                log("      ", line)

    def bits(self) -> None:
        """Hints are about speed only."""
        s = cases.sized(spec(masks=cases.CAUSAL), 2, 8, 2, 777, 1300)
        groups = {
            "sm_90a": [
                build(spec(masks=cases.CAUSAL), "sm_90a", 128, 128, **h)
                for h in (
                    {},
                    *({n: "off"} for n in ("rotate", "split", "skip", "anchor", "lazy", "pingpong")),
                    {"order": "static"},
                    {"stages": "1"},
                )
            ],
            "sm_80": [
                build(spec(masks=cases.CAUSAL), "sm_80", 128, 64, **h)
                for h in ({}, {"stages": "2"}, {"resident": "on"}, {"split": "off"}, {"lazy": "off"})
            ],
        }
        for target, builds in groups.items():
            self.compile(builds)
            outcome = in_child(90, same_bits, self.ready(builds), s)
            self.results["bits"][target] = outcome
            different = [n for n, same in outcome.get("result", {}).items() if not same]
            self.say(f"same bits, {target}: {outcome.get('error') or (different or 'all')}")
        self.save()

    def time(
        self, title: str, s: AttentionSpec, builds: Sequence[Build], wanted: tuple[str, ...], seconds: float = 0.8
    ) -> dict[str, float]:
        if self.left < 15:
            self.say(f"{title}: out of time")
            return {}
        self.compile(builds)
        outcome = in_child(60, time_group, s, self.ready(builds), wanted, seconds)
        if "error" in outcome:
            self.say(f"{title} {s}: {outcome['error']}")
            return {}
        r = outcome["result"]
        self.results["times"].append({"title": title, "spec": str(s), **r})
        self.save()
        short = dict(r["tflops"])
        words = "  ".join(f"{n.removeprefix(title + '_')} {t:.0f}" for n, t in sorted(short.items(), key=lambda x: -x[1]))
        self.say(f"{s} | {words}" + "".join(f" | {n}: {w[:60]}" for n, w in r["unsupported"].items()))
        wrong = {n: d for n, d in r["difference"].items() if d > 1e-2}
        if wrong:
            self.say(f"    DIFFERS from the first rival: {wrong}")
        return short

    def best(self, builds: Sequence[Build], found: dict[str, float], count: int = 1) -> list[Build]:
        by_name = {b.name: b for b in builds}
        return [by_name[n] for n, _ in sorted(found.items(), key=lambda x: -x[1]) if n in by_name][:count]


def tokens(s: AttentionSpec, seqlen: int, kv_heads: int = 0) -> AttentionSpec:
    """16,384 tokens, 2,048 = heads x head_dim_v."""
    heads = 2048 // s.head_dim_v
    return cases.sized(s, 16384 // seqlen, heads, kv_heads or heads, seqlen, seqlen)


def tuned(
    session: Session, target: str, s: AttentionSpec, choices: Sequence[Build], wanted: tuple[str, ...], lengths: Sequence[int]
) -> None:
    """The best of the choices at 8k, then that at every length."""
    found = session.time(f"tune {target}", tokens(s, 8192), choices, wanted, 1.0)
    best = session.best(choices, found, 2)
    for n in lengths:
        session.time(f"bench {target}", tokens(s, n), best, wanted)


def choices_90(s: AttentionSpec) -> list[Build]:
    causal = bool(s.masks)
    d = max(s.head_dim, s.head_dim_v)
    tiles = {
        64: [(192, 128), (128, 128), (192, 96), (128, 176)],
        128: [(128, 128), (192, 80), (128, 160), (128, 176), (128, 112)],
    }.get(d, [])
    if d == 192:
        tiles = [(128, 112), (128, 96), (128, 128)]
    if d == 256:
        tiles = [(128, 80), (128, 64)]
    out = [build(s, "sm_90a", m, n) for m, n in tiles]
    m, n = tiles[0] if causal or d != 128 else tiles[1]
    out += [
        build(s, "sm_90a", m, n, pingpong="off"),
        build(s, "sm_90a", m, n, order="static"),
    ]
    return out


def choices_80(s: AttentionSpec) -> list[Build]:
    if s.head_dim <= 64:
        tiles = [
            (128, 64, {}),
            (128, 64, {"resident": "off"}),
            (128, 128, {"resident": "off"}),
            (64, 64, {}),
            (128, 64, {"stages": "2"}),
            (128, 96, {}),
            (128, 32, {}),
        ]
    else:
        tiles = [
            (128, 64, {}),
            (128, 32, {}),
            (128, 48, {}),
            (128, 64, {"warps": "8"}),
            (128, 128, {"warps": "8"}),
            (64, 64, {}),
            (128, 32, {"stages": "2"}),
            (128, 64, {"stages": "2"}),
        ]
    return [build(s, "sm_80", m, n, **h) for m, n, h in tiles]


def choices_75(s: AttentionSpec) -> list[Build]:
    tiles = (
        [(128, 64, {}), (128, 32, {}), (64, 64, {}), (128, 64, {"warps": "8"})]
        if s.head_dim <= 64
        else [(128, 32, {}), (64, 32, {}), (128, 32, {"warps": "8"}), (64, 64, {}), (128, 64, {"warps": "8"})]
    )
    return [build(s, "sm_75", m, n, **h) for m, n, h in tiles]


def bench_variants(session: Session) -> None:
    """4 x 16 x 4,096 x 128 against FlexAttention."""
    rules = {
        "causal": (cases.CAUSAL, ()),
        "window": ((cases.Rule.make("window", left=1023),), ()),
        "alibi": (cases.CAUSAL, (cases.Rule.make("alibi"),)),
        "softcap": (cases.CAUSAL, (cases.Rule.make("softcap", cap=20.0),)),
        "document": ((cases.Rule.make("document"),), ()),
        "prefix": ((cases.Rule.make("prefix", length=1024),), ()),
    }
    for masks, scores in rules.values():
        s = spec("bf16", 128, 128, masks, scores)
        at = cases.sized(s, 4, 16, 16, 4096, 4096)
        builds = [
            build(s, "sm_90a", 128, 128),
            build(s, "sm_90a", 128, 96),
            build(s, "sm_90a", 192, 80),
            build(s, "sm_80", 128, 64),
            build(s, "sm_80", 128, 32),
        ]
        session.time("variants", at, builds, ("flex",), 0.6)


def run(session: Session, phases: Sequence[str]) -> None:
    for phase in phases:
        log(f"== {phase}, {session.left:.0f} s left")
        try:
            phase_of(session, phase)
        except Exception as error:  # noqa: BLE001 - the other phases go on
            session.say(f"phase {phase} stopped: {type(error).__name__}: {error}")


def phase_of(session: Session, phase: str) -> None:
    full, causal = spec(), spec(masks=cases.CAUSAL)
    match phase:
        case "smoke":
            session.check(
                [
                    build(spec(masks=cases.CAUSAL), "sm_90a", 128, 128),
                    build(spec(masks=cases.CAUSAL), "sm_80", 128, 64),
                    build(spec("fp16", masks=cases.CAUSAL), "sm_75", 128, 32),
                ]
            )
        case "check":
            session.check(cases.check_builds())
        case "bits":
            session.bits()
        case "tune90":
            session.compile([b for s in (full, causal) for b in choices_90(s)])
            for s in (full, causal):
                tuned(session, "sm_90a", s, choices_90(s), ("cudnn",), (1024, 2048, 4096, 16384))
        case "bench90":
            grid = [spec("bf16", 64, 64), spec("bf16", 192, 128), spec("bf16", 256, 256), spec("fp16", 128, 128)]
            both = [x for s in grid for x in (s, spec(s.dtype, s.head_dim, s.head_dim_v, cases.CAUSAL))]
            session.compile([b for s in both for b in choices_90(s)])
            for s in both:
                tuned(session, "sm_90a", s, choices_90(s), ("cudnn",), (2048, 16384))
        case "tune80":
            grid = [spec("bf16", 128), spec("bf16", 64), spec("fp16", 128), spec("fp16", 64)]
            both = [x for s in grid for x in (s, spec(s.dtype, s.head_dim, 0, cases.CAUSAL))]
            session.compile([b for s in both for b in choices_80(s)])
            for s in both:
                tuned(session, "sm_80", s, choices_80(s), ("flash",), (1024, 16384) if s.dtype == "bf16" else (4096,))
        case "tune75":
            both = [spec("fp16", d, 0, m) for d in (128, 64) for m in ((), cases.CAUSAL)]
            session.compile([b for s in both for b in choices_75(s)])
            for s in both:
                tuned(session, "sm_75", s, choices_75(s), ("efficient",), (2048,))
        case "variants":
            bench_variants(session)
        case other:
            raise ValueError(f"--phases: unknown phase {other!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="file for every number, JSON")
    parser.add_argument("--phases", default="smoke,check,bits,tune90,tune80,tune75,variants")
    parser.add_argument("--budget-s", type=float, default=540)
    options = parser.parse_args()
    import torch  # noqa: F401 - imported before the children fork, which then start at once; touches no device

    session = Session(options.budget_s, options.out)
    session.results["environment"] = environment()
    session.results["arguments"] = vars(options)
    log(session.results["environment"])
    run(session, options.phases.split(","))
    session.save()
    print("\n== table\n" + "\n".join(session.table), flush=True)


if __name__ == "__main__":
    main()
