"""The figures of `benchmarks/gpu_farm.py`, on rows made by hand: how busy cards were, and whether two sweeps agree."""

from __future__ import annotations

import datetime as dt
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def gpu_farm() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "gpu_farm.py"
    spec = importlib.util.spec_from_file_location("gpu_farm", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(card: str, end: float, seconds: float, **more: Any) -> dict[str, Any]:
    at = dt.datetime.fromtimestamp(1000.0 + end, dt.UTC)
    return {"uuid_hash": card * 64, "created_at": at, "gpu_s": seconds, "reason_code": "ok", "spec_name": "s"} | more


def test_a_card_is_busy_while_an_attempt_has_it_and_steady_while_none_is_out_of_work(gpu_farm: ModuleType) -> None:
    rows = [row("a", 12, 2), row("a", 15, 2), row("a", 30, 10), row("b", 14, 3), row("b", 18, 4), row("b", 20, 1)]
    found = gpu_farm.busy(rows, started=1000.0)
    assert found["steady_s"] == 9.0, "from 11, when the second had begun, to 20, when it had ended its last"
    assert found["busy"] == {"a" * 8: round(3 / 9, 4), "b" * 8: round(8 / 9, 4)}
    assert found["busy_from_start"] == {"a" * 8: round(14 / 30, 4), "b" * 8: round(8 / 30, 4)}
    assert found["until_first_attempt_s"] == 11.0 and found["attempts"] == {"a" * 8: 3, "b" * 8: 3}


def test_sweeps_are_compared_attempt_by_attempt_and_card_by_card(gpu_farm: ModuleType) -> None:
    def timed(key: str, card: str, p50_s: float, tuning: str, ratio: float = 1.0) -> dict[str, Any]:
        return row(
            card, 1, 1, attempt_key=key, p20_s=0.99 * p50_s, p50_s=p50_s, p80_s=1.01 * p50_s, tuning=tuning, ratio_p50=ratio
        )

    one = [timed("x", "a", 1.0, "X"), timed("y", "a", 2.0, "Y"), timed("z", "a", 3.0, "Z")]
    every = [timed("x", "a", 1.01, "X"), timed("y", "b", 2.1, "Y", 1.2), timed("w", "b", 0.5, "W")]
    found = gpu_farm.compare(one, every)
    assert found["in_both"] == 2 and found["other_verdict"] == 0
    assert found["times_same_card"] == {"attempts": 1, "median": 1.01, "min": 1.01, "max": 1.01}
    assert found["times_other_card"] == {"attempts": 1, "median": 1.05, "min": 1.05, "max": 1.05}
    assert found["ratio_to_rival"]["max"] == 1.2 and found["spreads_meet"] == 1
    assert (found["same_best"], found["other_best"]) == ([], ["s"])
