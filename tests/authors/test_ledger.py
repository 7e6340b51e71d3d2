"""Budgets are checked before work starts and overshot by at most one attempt a worker."""

import threading

import pytest

from generator.authors.exchange import Answer
from generator.authors.ledger import Budget, Ledger, Price, Spent


def answer(tokens_in=1000, tokens_out=500):
    return Answer("x", "stop", tokens_in, tokens_out, False, "m", 2.0)


def test_an_answer_costs_what_the_price_table_says():
    ledger = Ledger(prices={"m": Price(2.0, 10.0)})
    spent = ledger.add_answer("m", answer())
    assert (spent.usd, spent.tokens, spent.requests, spent.model_s) == (0.007, 1500, 1, 2.0)
    assert ledger.add_answer("unknown", answer()).usd == 0


@pytest.mark.parametrize("name", ["usd", "tokens", "gpu_s", "compile_s", "model_s"])
def test_each_limit_stops_admission(name):
    ledger = Ledger(Budget(**{name: 10}))
    assert ledger.exhausted() is None
    entry = Spent(tokens_in=10) if name == "tokens" else Spent(**{name: 10})
    ledger.settle(ledger.admit(Spent()), entry)
    assert ledger.admit(Spent()) is None
    assert f"budget {name}: 10 of 10 spent" in ledger.exhausted()
    assert ledger.remaining() == {name: 0.0}


@pytest.mark.parametrize("bad", [{"usd": -1}, {"tokens": float("nan")}])
def test_a_budget_below_zero_is_refused(bad):
    with pytest.raises(ValueError, match=f"budget {next(iter(bad))}"):
        Budget(**bad)


def test_eight_workers_overshoot_by_at_most_one_attempt_each():
    ledger = Ledger(Budget(gpu_s=100.0))
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
    ledger = Ledger(Budget(usd=1.0))
    first = ledger.admit(Spent(usd=1.0))
    assert first is not None and ledger.admit(Spent(usd=0.1)) is None
    ledger.settle(first, Spent(usd=0.2))
    assert ledger.admit(Spent(usd=0.1)) is not None
