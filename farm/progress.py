"""What a person sees of a running sweep: a live display on a terminal, plain lines elsewhere. Stores nothing."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from farm.jobs import Job, Row
from farm.machine_view import machine_lines
from generator.spec import AttentionSpec

#: Problems kept for the closing table; a larger sweep is read with `farm catalog best`.
TABLE_LIMIT = 500
#: Where lines are all that a person sees, a sweep that waits for a model says so this often.
SILENCE_S = 15.0


@dataclass(frozen=True, slots=True)
class Shown:
    """The row that stands for a problem: the fastest right one; else the last failure."""

    spec: AttentionSpec
    target: str
    row: Row

    @property
    def is_verified(self) -> bool:
        return bool(self.row["reason_code"] == "ok")


@dataclass(slots=True)
class Tally:
    """Sums over a sweep, and the best attempt of each problem."""

    expected: int = 0  # attempts, as far as the plan tells
    planned: int = 0
    known: int = 0
    by_reason: Counter[str] = field(default_factory=Counter)
    best: dict[tuple[str, str], Shown] = field(default_factory=dict)
    best_ratio: float = 0.0
    started: float = field(default_factory=time.monotonic)
    author: Callable[[], str] = lambda: ""  # what a language model is doing and what it has cost
    _recent: list[float] = field(default_factory=list)

    @property
    def ended(self) -> int:
        return sum(self.by_reason.values())

    @property
    def rate_per_min(self) -> float:
        """Attempts a minute over the last twenty."""
        if len(self._recent) < 2:
            return 0.0
        return 60 * (len(self._recent) - 1) / max(self._recent[-1] - self._recent[0], 1e-9)

    @property
    def left_s(self) -> float | None:
        open_ = self.expected - self.known - self.ended
        return 60 * max(0, open_) / self.rate_per_min if self.rate_per_min and self.expected else None

    def plain(self) -> dict[str, Any]:
        """For `farm status`."""
        return {
            "planned": self.planned,
            "known": self.known,
            "by_reason": dict(self.by_reason),
            "rate_per_min": round(self.rate_per_min, 2),
            "left_s": self.left_s,
            "best_ratio": round(self.best_ratio, 3),
            "author": self.author(),
        }

    def add(self, job: Job, row: Row, known: bool) -> None:
        if known:
            self.known += 1
        else:
            self.by_reason[row["reason_code"]] += 1
            self._recent = [*self._recent[-20:], time.monotonic()]
        ratio = row.get("ratio_p50")
        if row["reason_code"] == "ok" and ratio:
            self.best_ratio = max(self.best_ratio, ratio)
        key = (job.spec.hash, job.target)
        if key in self.best or len(self.best) < TABLE_LIMIT:
            self.best[key] = _better(self.best.get(key), Shown(job.spec, job.target, row))


def _better(now: Shown | None, new: Shown) -> Shown:
    """Later rungs measure longer and count more."""
    if now is None or not now.is_verified:
        return new
    return new if new.is_verified and _rank(new.row) > _rank(now.row) else now


def _rank(row: Row) -> tuple[int, float]:
    """Only the rules' generations are rungs; a model's are answers, and a later one may well be slower."""
    rung = 0 if (row.get("author_mode") or "rules") != "rules" else row.get("generation") or 0
    return rung, row.get("ratio_p50") or 0.0


def describe(job: Job, row: Row) -> str:
    """One line about an attempt that ended."""
    name, holes = job.spec.name or "spec", ",".join(f"{k}={v}" for k, v in (job.columns.get("tuning") or {}).items())
    head = f"{name} {job.spec} {job.target} {holes}".rstrip()
    if row["reason_code"] != "ok":
        return f"{head}: {row['reason_code']}: {row.get('message') or ''}".rstrip(": ")
    ours, rival = row.get("p50_s"), row.get("baseline_p50_s")
    text = f"{head}: ok"
    if ours:
        text += f", {1e3 * ours:.3f} ms"
    if rival and row.get("ratio_p50"):
        text += f", {row.get('baseline_name')} {1e3 * rival:.3f} ms, {row['ratio_p50']:.2f}x"
    return text


class PlainDisplay:
    """One line for each attempt that ended: for pipes, files and CI. Where nothing ends for a while, what the model is doing."""

    def __init__(self, tally: Tally, say: Callable[[str], None]) -> None:
        self.tally, self._say = tally, say
        self._spoke = time.monotonic()

    def planned(self, job: Job) -> None:
        self.tally.planned += 1

    def ended(self, job: Job, row: Row) -> None:
        self.tally.add(job, row, known=False)
        self._spoke = time.monotonic()
        self._say(f"[{self.tally.ended + self.tally.known}/{max(self.tally.expected, self.tally.planned)}] {describe(job, row)}")

    def known(self, job: Job, row: Row) -> None:
        self.tally.add(job, row, known=True)

    def note(self, text: str) -> None:
        self._say(text)

    def pulse(self) -> None:
        """Called about once a second."""
        if time.monotonic() - self._spoke >= SILENCE_S and (line := self.tally.author()):
            self._say(line)
            self._spoke = time.monotonic()

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class LiveDisplay(PlainDisplay):
    """A few lines that stay at the bottom of a terminal, and the last attempts above them."""

    def __init__(self, tally: Tally, state: Callable[[], dict[str, Any]]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True)
        self._state = state
        super().__init__(
            tally, lambda line: self._console.print(line, markup=False, highlight=False, overflow="ellipsis", no_wrap=True)
        )
        # last: it renders at once
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=2, transient=True)

    def note(self, text: str) -> None:
        """Whole, however narrow the terminal: what is said once may hold a cure."""
        self._console.print(text, markup=False, highlight=False)

    def pulse(self) -> None:
        """The lines are up to date anyway."""

    def __enter__(self) -> LiveDisplay:
        self._live.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._live.__exit__(*args)

    def _render(self) -> Any:
        from rich.table import Table

        tally = self.tally
        grid = Table.grid(padding=(0, 2))
        failed = ", ".join(f"{n} {reason}" for reason, n in tally.by_reason.most_common() if reason != "ok")
        left = "" if tally.left_s is None else f", about {clock(tally.left_s)} left"
        grid.add_row(
            "done", f"{tally.by_reason['ok']} ok, {tally.ended} of about {max(tally.expected, tally.planned)} attempts{left}"
        )
        if tally.known:
            grid.add_row("before", f"{tally.known} ended in an earlier start")
        grid.add_row("failed", failed or "none")
        best = f"{tally.best_ratio:.2f}x the rival" if tally.best_ratio else "none yet"
        grid.add_row("best", best)
        grid.add_row("rate", f"{tally.rate_per_min:.1f} attempts a minute, {clock(time.monotonic() - tally.started)} so far")
        if author := tally.author():
            grid.add_row("author", author)
        for line in machine_lines(self._state()):
            grid.add_row("machine", line)
        return grid


def waits_of(state: dict[str, Any]) -> set[str]:
    """Who keeps devices from being measured on, by an executor's state."""
    return {who for each in (state, *state.get("devices", ())) if (who := each.get("waits_for"))}


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def make_display(tally: Tally, state: Callable[[], dict[str, Any]], quiet: bool = False) -> PlainDisplay:
    """The display that fits where the output goes. Progress goes to stderr, so that stdout holds the result only."""
    if quiet:
        return PlainDisplay(tally, lambda line: None)
    if sys.stderr.isatty():
        return LiveDisplay(tally, state)
    return PlainDisplay(tally, lambda line: print(line, file=sys.stderr, flush=True))
