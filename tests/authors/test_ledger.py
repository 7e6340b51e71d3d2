"""Budgets are checked before work starts and overshot by at most one attempt a worker."""

import asyncio
import threading

import pytest

from generator.authors.exchange import Answer, Exchange, Message, Request
from generator.authors.ledger import Allowance, Ledger, Price, Spent


def exchange(model="m", text="hello"):
    return Exchange(Request(model, (Message("user", text),), 100), Answer("x", "stop", 1000, 500, False, "m", 2.0))


def test_an_answer_costs_what_the_price_table_says():
    ledger = Ledger(prices={"m": Price(2.0, 10.0)})
    spent = ledger.cost_of(exchange())
    assert (spent.usd, spent.tokens, spent.requests, spent.model_s) == (0.007, 1500, 1, 2.0)
    assert ledger.cost_of(exchange("unknown")).usd == 0


def test_an_answer_that_two_problems_share_is_paid_once():
    ledger = Ledger(prices={"m": Price(2.0, 10.0)})
    assert ledger.cost_of(exchange()).usd > 0
    assert ledger.cost_of(exchange()) == Spent()


@pytest.mark.parametrize("name", ["usd", "tokens", "gpu_s", "compile_s", "model_s"])
def test_each_limit_stops_admission(name):
    ledger = Ledger(Allowance(**{name: 10}))
    assert ledger.exhausted() is None
    entry = Spent(tokens_in=10) if name == "tokens" else Spent(**{name: 10})
    ledger.settle(ledger.admit(Spent()), entry)
    assert ledger.admit(Spent()) is None
    assert f"budget {name}: 10 of 10 spent" in ledger.exhausted()
    assert ledger.remaining() == {name: 0.0}


@pytest.mark.parametrize("bad", [{"usd": -1}, {"tokens": float("nan")}])
def test_a_budget_below_zero_is_refused(bad):
    with pytest.raises(ValueError, match=f"budget {next(iter(bad))}"):
        Allowance(**bad)


def test_eight_workers_overshoot_by_at_most_one_attempt_each():
    ledger = Ledger(Allowance(gpu_s=100.0))
    started = []

    def work():
        while (reservation := ledger.admit(Spent(gpu_s=1.0))) is not None:
            started.append(1)
            ledger.settle(reservation, Spent(gpu_s=3.0))

    workers = [threading.Thread(target=work) for _ in range(8)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert 100.0 <= ledger.spent.gpu_s <= 100.0 + 8 * 3.0


def test_reservations_of_others_count():
    ledger = Ledger(Allowance(usd=1.0))
    first = ledger.admit(Spent(usd=1.0))
    assert first is not None and ledger.admit(Spent(usd=0.1)) is None
    ledger.settle(first, Spent(usd=0.2))
    assert ledger.admit(Spent(usd=0.1)) is not None


def test_who_asks_while_others_hold_the_rest_waits_until_it_is_free():
    async def main():
        ledger = Ledger(Allowance(tokens=100))
        first = await ledger.reserve(Spent(tokens_out=200))
        second = asyncio.ensure_future(ledger.reserve(Spent(tokens_out=200)))
        await asyncio.sleep(0.01)
        assert not second.done()
        ledger.settle(first, Spent(tokens_out=40))
        assert await asyncio.wait_for(second, 1) is not None, "the first one spent less than it held"
        third = asyncio.ensure_future(ledger.reserve(Spent(tokens_out=1)))
        await asyncio.sleep(0.01)
        ledger.settle(await second, Spent(tokens_out=60))
        assert await asyncio.wait_for(third, 1) is None and ledger.exhausted()

    asyncio.run(main())


def test_a_ledger_in_words():
    assert Spent(1, 1200, 400, 0.0131, 12.0, 3.0, 8.0).in_words() == (
        "1,200 tokens in, 400 out, 0.0131 USD, 12 s of model, 3 s of compiling, 8 s on the device"
    )
    assert Spent().in_words() == "no tokens"
