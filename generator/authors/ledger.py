"""What a run has cost and may cost: tokens, money, seconds. Asks no model and stops nothing by itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from generator.authors.exchange import Exchange


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars for a million tokens."""

    usd_per_million_in: float = 0.0
    usd_per_million_out: float = 0.0

    def usd(self, tokens_in: int, tokens_out: int) -> float:
        return (tokens_in * self.usd_per_million_in + tokens_out * self.usd_per_million_out) / 1e6


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a run may spend; None is no limit. gpu_s counts seconds on the device being measured, a CPU target's too."""

    usd: float | None = None
    tokens: int | None = None
    gpu_s: float | None = None
    compile_s: float | None = None
    model_s: float | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and not value >= 0:
                raise ValueError(f"budget {f.name}: expected a number of at least 0, found {value!r}")


@dataclass(frozen=True, slots=True)
class Spent:
    """Sums: of an attempt, of a search, or of a run. Requests that were never answered are not in them; the transcript store
    knows those (`TranscriptStore.unsettled`).
    """

    requests: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    usd: float = 0.0
    model_s: float = 0.0
    compile_s: float = 0.0
    gpu_s: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def tokens(self) -> int:
        return self.tokens_in + self.tokens_out

    def in_words(self) -> str:
        """`1,200 tokens in, 400 out, 0.0131 USD, 12 s of model, 3 s of compiling, 8 s on the device`."""
        parts = [f"{self.tokens_in:,} tokens in, {self.tokens_out:,} out" if self.tokens else "no tokens"]
        parts += [f"{self.usd:.4f} USD"] * bool(self.usd)
        seconds = ((self.model_s, "of model"), (self.compile_s, "of compiling"), (self.gpu_s, "on the device"))
        return ", ".join(parts + [f"{s:,.0f} s {what}" for s, what in seconds if s >= 0.5])


@dataclass(frozen=True, slots=True)
class Paid:
    """A sum, and the names of what it paid for as far as that has any (`Ledger.settle`)."""

    spent: Spent = Spent()
    names: tuple[str, ...] = ()

    def __add__(self, other: Paid) -> Paid:
        return Paid(self.spent + other.spent, self.names + other.names)


@dataclass
class Ledger:
    """The one mutable book of a run; safe to use from several threads.

    `admit` is asked before work starts and reserves the work's upper bound, so that no two workers spend the same last dollar:
    what a worker overshoots is at most what its one attempt in flight costs beyond its estimate. `reserve` waits while others
    hold what may turn out not to be spent. A run that loses its author goes on with another ledger: `news` of the first, added
    up, is what the next one has to `take_over`.
    """

    budget: Allowance = field(default_factory=Allowance)
    prices: Mapping[str, Price] = field(default_factory=dict)
    spent: Spent = field(default_factory=Spent)
    _reserved: dict[int, Spent] = field(default_factory=dict, repr=False)
    _booked: set[str] = field(default_factory=set, repr=False)
    _paid: set[str] = field(default_factory=set, repr=False)
    _news: list[Paid] = field(default_factory=list, repr=False)
    _next: int = field(default=0, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list, repr=False)

    def price(self, model: str) -> Price:
        return self.prices.get(model, Price())

    def admit(self, estimate: Spent) -> int | None:
        """A reservation for work of at most about `estimate`, or None: the budget has no room for any of it."""
        with self._lock:
            held = sum(self._reserved.values(), self.spent)
            if exceeded(self.budget, held) is not None:
                return None
            self._next += 1
            self._reserved[self._next] = estimate
            return self._next

    async def reserve(self, estimate: Spent) -> int | None:
        """A reservation, as soon as work in flight leaves room for it; None once the budget itself is spent."""
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        while (reservation := self.admit(estimate)) is None:
            with self._lock:
                if exceeded(self.budget, self.spent) is not None or not self._reserved:
                    return None
                waiter[1].clear()
                self._waiters.append(waiter)
            await waiter[1].wait()
        return reservation

    def settle(self, reservation: int | None, actual: Spent, name: str = "") -> None:
        """The reserved work is over and cost `actual`; nothing more where what has this name was paid for before."""
        with self._lock:
            if reservation is not None:
                self._reserved.pop(reservation, None)
            if not name or name not in self._paid:
                self._paid.update(filter(None, [name]))
                self._news.append(Paid(actual, tuple(filter(None, [name]))))
                self.spent = self.spent + actual
            waiters, self._waiters = self._waiters, []
        for loop, event in waiters:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def estimate(self, model: str, tokens_in: int, tokens_out: int) -> Spent:
        """What an answer of so many tokens would cost, as an entry that `admit` takes."""
        return Spent(0, tokens_in, tokens_out, self.price(model).usd(tokens_in, tokens_out))

    def cost_of(self, exchange: Exchange) -> Spent:
        """What an answer cost, as an entry that `settle` takes: nothing where this ledger was asked for the same one before."""
        answer = exchange.answer
        with self._lock:
            if exchange.request.hash in self._booked:
                return Spent()
            self._booked.add(exchange.request.hash)
        usd = self.price(exchange.request.model).usd(answer.tokens_in, answer.tokens_out)
        return Spent(1, answer.tokens_in, answer.tokens_out, usd, answer.seconds)

    def news(self) -> Paid:
        """What was settled since this was last asked."""
        with self._lock:
            news, self._news = self._news, []
        return sum(news, Paid())

    def take_over(self, paid: Paid) -> None:
        """What another ledger of this run paid, and what for: it costs nothing again."""
        with self._lock:
            self._paid.update(paid.names)
            self.spent = self.spent + paid.spent

    def exhausted(self) -> str | None:
        """Why no more work may start, in words, or None."""
        with self._lock:
            return exceeded(self.budget, self.spent)

    def remaining(self) -> dict[str, float]:
        """Each limited quantity -> what is left of it, at least 0; for prompts and the live line."""
        with self._lock:
            pairs = _limits(self.budget, self.spent)
            return {name: max(0.0, limit - used) for name, limit, used in pairs}

    def to_plain(self) -> dict[str, Any]:
        return {f.name: getattr(self.spent, f.name) for f in fields(self.spent)} | {"remaining": self.remaining()}


def _limits(budget: Allowance, spent: Spent) -> list[tuple[str, float, float]]:
    """(name, limit, used) of each limited quantity."""
    return [(f.name, limit, getattr(spent, f.name)) for f in fields(budget) if (limit := getattr(budget, f.name)) is not None]


def exceeded(budget: Allowance, spent: Spent) -> str | None:
    """The first limit that is reached, in words, or None."""
    for name, limit, used in _limits(budget, spent):
        if used >= limit:
            return f"budget {name}: {used:g} of {limit:g} spent"
    return None
