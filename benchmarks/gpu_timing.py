"""How calls are timed on a GPU: items in a forked child, contestants in turns, errors on sampled rows. Chooses nothing."""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gpu_cases as cases

from generator.spec import AttentionSpec, Rule


def streamed(work: Callable[[Any], Any], items: Sequence[Any], limit_s: float, deadline: float) -> Iterator[tuple[Any, Any]]:
    """(item, result) of each item, worked on in turn by one forked child; another child goes on behind an item that ends one.

    Items that the time until `deadline` (monotonic seconds) does not reach are left out. A result that is a string is an error.
    """
    rest = list(items)
    while rest and time.monotonic() < deadline:
        here, there = mp.Pipe(False)
        child = mp.get_context("fork").Process(target=_serve, args=(there, work, rest, deadline))
        child.start()
        there.close()
        while rest:
            try:
                if not here.poll(limit_s):
                    raise EOFError
                state, answer = here.recv()
            except EOFError:
                if time.monotonic() < deadline:
                    yield rest[0], f"no answer: the process hung for {limit_s:g} s or died"
                rest = rest[1:]
                break
            if state == "late":
                rest = []
                break
            yield rest.pop(0), answer
            if state == "broken":
                break
        child.kill()
        child.join()


def _serve(there: Any, work: Callable[[Any], Any], items: Sequence[Any], deadline: float) -> None:
    """Sends (state, answer) for each item: "good"; "broken": the device is not to be trusted after it; "late": out of time."""
    for item in items:
        if time.monotonic() >= deadline:
            there.send(("late", None))
            break
        try:
            there.send(("good", work(item)))
        except Exception as error:  # noqa: BLE001 - a cell that fails is a result
            there.send(("broken", f"{type(error).__name__}: {str(error)[:300]}"))
            break
    there.close()
    os._exit(0)


def input_sets(torch: Any, s: AttentionSpec, count: int) -> list[dict[str, Any]]:
    out = []
    for seed in range(count):
        q, k, v, o = cases.random_qkv(torch, s, seed + 3)
        lse = torch.empty((s.batch, s.num_heads, s.seqlen_q), device="cuda")
        out.append({"q": q, "k": k, "v": v, "o": o, "lse": lse, **cases.captured(torch, s)})
    return out


def in_turns(torch: Any, calls: dict[str, list[Callable[[], Any]]], rounds: int, heat_s: float) -> dict[str, list[float]]:
    """Milliseconds of single calls, contestants taking turns, another input set each round.

    Before the timed rounds they take turns for `heat_s` seconds: a card in service runs at the clocks that its power limit
    leaves, not at those of the first milliseconds after a pause. Nothing waits between calls, so that no launch is timed.
    """

    def turns(count: int) -> dict[str, list[tuple[Any, Any]]]:
        events: dict[str, list[Any]] = {n: [] for n in calls}
        for i in range(count):
            for n, own in calls.items():
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record()
                own[i % len(own)]()
                b.record()
                events[n].append((a, b))
        return events

    for own in calls.values():
        for call in own:
            call()
    first = turns(1)
    torch.cuda.synchronize()
    round_s = sum(a.elapsed_time(b) for pairs in first.values() for a, b in pairs) / 1e3
    turns(math.ceil(heat_s / max(round_s, 1e-5)))
    events = turns(rounds)
    torch.cuda.synchronize()
    return {n: [a.elapsed_time(b) for a, b in pairs] for n, pairs in events.items()}


_LAST: dict[AttentionSpec, tuple[list[dict[str, Any]], list[cases.Rivals]]] = {}


def opponents(torch: Any, s: AttentionSpec, names: Sequence[str]) -> tuple[list[dict[str, Any]], list[cases.Rivals]]:
    """Input sets and the rivals' calls on them; the cell before's where they are the same, since FlexAttention compiles."""
    flex = names[0] == "flex"
    if s not in _LAST:
        _LAST.clear()
        torch.cuda.empty_cache()
        if flex:  # each variant is a compilation; past a number of them on record the compiler would give up quietly
            torch._dynamo.reset()
        sets = input_sets(torch, s, 1 if flex else 2)
        _LAST[s] = sets, [cases.Rivals() for _ in sets]
    for x, rivals in zip(*_LAST[s], strict=True):
        found = cases.rivals(torch, s, x["q"], x["k"], x["v"], tuple(n for n in names if not _tried(rivals, n)))
        rivals.calls |= found.calls
        rivals.unsupported |= found.unsupported
    return _LAST[s]


def _tried(rivals: cases.Rivals, name: str) -> bool:
    return name in rivals.calls or name in rivals.unsupported


def sampled_error(torch: Any, s: AttentionSpec, tensors: dict[str, Any], rows: int = 96) -> float:
    """Relative rms error of O against float64 on rows of the first and the last head."""
    top = bottom = 0.0
    at = torch.linspace(0, s.seqlen_q - 1, rows, device="cuda").long()
    for b, h in ((0, 0), (s.batch - 1, s.num_heads - 1)):
        q, k, v = tensors["q"][b, h, at].double(), tensors["k"][b, h // s.group].double(), tensors["v"][b, h // s.group].double()
        x = q @ k.T * cases.scale_of(s)
        i, j = at[:, None], torch.arange(s.seqlen_k, device="cuda")[None, :]
        for rule in s.scores:
            x = _scored(torch, rule, x, tensors, h, i, j)
        for rule in s.masks:
            x = x.masked_fill(~_visible(rule, tensors, b, i, j), -torch.inf)
        expected = torch.softmax(x, -1) @ v
        top += float((tensors["o"][b, h, at].double() - expected).square().sum())
        bottom += float(expected.square().sum())
    return math.sqrt(top / bottom)


def _scored(torch: Any, rule: Rule, x: Any, tensors: dict[str, Any], h: int, i: Any, j: Any) -> Any:
    if rule.name == "softcap":
        cap = float(dict(rule.parameters)["cap"])
        return cap * torch.tanh(x / cap)
    if rule.name == "alibi":
        return x + tensors["Slopes"][h].double() * (j - i)
    raise ValueError(f"no reference for {rule.name}")


def _visible(rule: Rule, tensors: dict[str, Any], b: int, i: Any, j: Any) -> Any:
    options = dict(rule.parameters)
    match rule.name:
        case "causal":
            return j <= i
        case "window":
            return (j <= i) & (i - j <= int(options["left"]))
        case "prefix":
            return (j <= i) | (j < int(options["length"]))
        case "document":
            start, end = tensors["DocStart"][b].long(), tensors["DocEnd"][b].long()
            return (j >= start[i]) & (j < end[i])
    raise ValueError(f"no reference for {rule.name}")
