"""A search for one problem: tiles, then neighbours of the fastest, halving, what is put aside, and what the catalog taught."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from catalog import store
from catalog.schema import make_row
from farm import stages
from farm.history import History
from farm.jobs import ASIDE, Job
from farm.places import AttemptsAt, Place
from farm.plan import Plan, Tuning
from farm.search import RuleSearch, Versions, fastest_first
from generator.authors.rules import RuleAuthor
from generator.spec import AttentionSpec, Rule
from generator.targets import find_target
from generator.tuning import TUNED_HINTS, ordered_choices

SPEC = AttentionSpec(8, 8, 128, 128, 1, 1024, 1024, "bf16", masks=(Rule.make("causal"),), name="made up")
VERSIONS = Versions("t1", "h1")
LIKED, ALSO_LIKED = (dict([hint]) for hint in TUNED_HINTS["sm_80"][:2])


def seconds(choice: dict[str, Any]) -> float:
    """A made-up machine: it likes tiles of 64 keys, one hint and, a little, another."""
    time = 1e-3 * (1 + abs(int(choice["BN"]) - 64) / 64 + abs(int(choice["BM"]) - 128) / 64)
    return time * (0.8 if LIKED.items() <= choice.items() else 1.0) * (0.95 if ALSO_LIKED.items() <= choice.items() else 1.0)


class Machine:
    """Gives rows for jobs; remembers them in order. spilling: choices whose binaries spill."""

    def __init__(self, spilling=lambda choice: 0, reason=lambda choice: "ok") -> None:
        self.jobs: list[Job] = []
        self.rows: dict[str, dict[str, Any]] = {}
        self._spilling, self._reason = spilling, reason

    async def __call__(self, job: Job) -> dict[str, Any]:
        if job.key in self.rows:
            return self.rows[job.key]
        self.jobs.append(job)
        choice, spilled = job.columns["tuning"], self._spilling(job.columns["tuning"])
        row: dict[str, Any] = {
            "reason_code": self._reason(choice),
            "message": "",
            "p50_s": seconds(choice),
            "spill_bytes": spilled,
        }
        if job.prune and spilled > 64:
            row = {"reason_code": "does_not_fit", "message": f"{ASIDE}it spills {spilled} bytes"}
        self.rows[job.key] = row | {"generation": job.columns["generation"], "spill_bytes": spilled}
        return self.rows[job.key]

    def tried(self, rung: int = 0) -> list[dict[str, Any]]:
        return [job.columns["tuning"] for job in self.jobs if job.columns["generation"] == rung]


def search(machine: Machine, candidates: int, target: str = "sm_80", history: History | None = None, spec=SPEC) -> None:
    plan = Plan("test", (), tuning=Tuning(candidates=candidates))
    solver = RuleSearch(plan, VERSIONS, history=history or History())
    asyncio.run(solver.solve(spec, target, machine))


def test_a_large_search_finds_the_hints_of_the_best_tiles() -> None:
    machine = Machine()
    search(machine, 16)
    assert len(machine.tried()) == 16 == len({json.dumps(c, sort_keys=True) for c in machine.tried()})
    tiles = ordered_choices(RuleAuthor().code(SPEC, "sm_80"), find_target("sm_80"), {})
    assert all(c in tiles for c in machine.tried()[: len(tiles)]) and not any(c in tiles for c in machine.tried()[len(tiles) :])
    rungs = [len(machine.tried(rung)) for rung in range(5)]
    assert rungs == [16, 8, 4, 2, 1]
    (last,) = machine.tried(4)
    assert last == min(machine.tried(), key=seconds) and last["BN"] == 64 and LIKED.items() <= last.items()
    times = [job.measure_s for job in machine.jobs]
    assert times[-1] == 16 * times[0]


def test_a_small_search_tries_tiles_only() -> None:
    machine = Machine()
    search(machine, 4)
    assert len(machine.tried()) == 4 and all(set(c) == {"BM", "BN"} for c in machine.tried())


def test_the_processor_is_searched_in_the_same_way() -> None:
    machine = Machine()
    search(machine, 9, "cpu-avx512")
    assert len(machine.tried()) == 9 and len(machine.tried(1)) == 4 and machine.tried(3) == [min(machine.tried(), key=seconds)]


def test_no_program_is_made_twice_and_hints_stand_in_it() -> None:
    machine = Machine()
    search(machine, 30)
    assert len({job.program for job in machine.jobs}) == len(machine.tried())
    (name, value), *_ = LIKED.items()
    job = next(j for j in machine.jobs if LIKED.items() <= j.columns["tuning"].items())
    assert f"Hint {name} = {value}\n" in job.program


def test_what_spills_is_put_aside_and_another_takes_its_place() -> None:
    machine = Machine(spilling=lambda c: 200 if c["BN"] == 64 else 0)
    search(machine, 6)
    measured = [c for c in machine.tried() if c["BN"] != 64]
    assert len(measured) == 6 and len(machine.tried()) > 6
    assert all(c["BN"] != 64 for rung in range(1, 4) for c in machine.tried(rung))


def test_where_everything_spills_what_spills_least_is_measured() -> None:
    machine = Machine(spilling=lambda c: 100 + int(c["BN"]))
    search(machine, 3)
    again = [job.columns["tuning"]["BN"] for job in machine.jobs if not job.prune and job.columns["generation"] == 0]
    assert len(again) == 3 and min(c["BN"] for c in machine.tried()) in again
    assert machine.tried(1)


def test_without_a_device_every_candidate_is_built() -> None:
    machine = Machine(reason=lambda c: "compiled_unverified")
    search(machine, 8)
    assert len(machine.tried()) == 8 and not machine.tried(1)


def row_of(spec: AttentionSpec, choice: dict[str, Any], number: int, **changes: Any) -> dict[str, Any]:
    columns = {"p50_s": 1e-3, "ratio_p50": 1.0, "device_key": "d" * 64, "reason_code": "ok", "translator_version": "t1"} | changes
    columns |= {"source_hash": "5" * 64, "binary_hash": "b" * 64, "launch": {}, "rule_id": "r", "verified_shapes": []}
    columns = {"attempt_key": f"{number:064x}", "generation": 0} | columns
    return make_row(
        attempt_no=1,
        spec=spec,
        target="sm_80",
        tuning=choice,
        author="rules",
        author_mode="rules",
        harness_version="h1",
        **columns,
    )


def taught(folder, *rows) -> History:
    opened = store.open(folder / "catalog", create=True)
    with opened.writer("r1") as writer:
        for row in rows:
            writer.append(row)
    return History(opened)


def test_what_won_at_the_nearest_shape_is_tried_first(tmp_path) -> None:
    tiles = ordered_choices(RuleAuthor().code(SPEC, "sm_80"), find_target("sm_80"), {})
    odd = tiles[-1] | {"warps": "4"}
    near, far = SPEC.with_shape(seqlen_q=2048, seqlen_k=2048), SPEC.with_shape(seqlen_q=16384, seqlen_k=16384)
    history = taught(
        tmp_path,
        row_of(far, tiles[2], 1, ratio_p50=9.0),
        row_of(near, odd, 2, ratio_p50=1.2),
        row_of(near, tiles[1], 3, ratio_p50=1.1),
        row_of(near, tiles[-2], 4, reason_code="wrong_value"),
    )
    machine = Machine()
    search(machine, 6, history=history)
    assert machine.tried()[:3] == [odd, tiles[1], tiles[2]]


def test_the_next_shape_of_a_sweep_learns_from_the_one_before(tmp_path) -> None:
    history, machine = History(), Machine()
    search(machine, 16, history=history)
    search(machine, 4, history=history, spec=SPEC.with_shape(seqlen_q=2000, seqlen_k=2000))
    best = sorted(machine.tried()[:16], key=seconds)[:2]
    assert machine.tried()[16:18] == best


def test_a_search_that_ended_makes_no_new_attempt(tmp_path) -> None:
    """The same command again: the candidates of before come first, and they are all."""
    opened = store.open(tmp_path / "catalog", create=True)
    machine = Machine(spilling=lambda c: 200 if c["BN"] == 128 else 0)

    def run() -> int:
        made = len(machine.jobs)
        plan = Plan("test", (), tuning=Tuning(candidates=12))
        attempt = AttemptsAt(Place("sm_80", "d" * 64, "a100"), machine)
        asyncio.run(RuleSearch(plan, VERSIONS, history=History(opened)).solve(SPEC, "sm_80", attempt))
        return len(machine.jobs) - made

    assert run() > 12
    with opened.writer("r1") as writer:
        for job in machine.jobs:
            row = machine.rows[job.key]
            changes = {"reason_code": row["reason_code"], "p50_s": row.get("p50_s"), "ratio_p50": None}
            changes |= {"generation": row["generation"], "attempt_key": job.key}
            writer.append(row_of(SPEC, job.columns["tuning"], 0, **changes))
    assert run() == 0


def test_a_search_that_was_killed_twice_goes_on_with_the_candidates_of_before(tmp_path) -> None:
    """Those that were in hand have rows that say so, and these are of the device that they were for."""
    opened, (translator, harness) = store.open(tmp_path / "catalog", create=True), stages.versions()
    search_of, attempts = Versions(translator, harness), Place("sm_80", "d" * 64, "a100")
    asked: list[list[dict[str, Any]]] = []
    for start in range(3):
        machine, plan = Machine(), Plan("test", (), tuning=Tuning(candidates=4))
        solver = RuleSearch(plan, search_of, history=History(opened))
        asyncio.run(solver.solve(SPEC, "sm_80", AttemptsAt(attempts, machine)))
        asked.append(machine.tried())
        with opened.writer(f"r{start}") as writer:
            for job in machine.jobs[1:3]:
                writer.append(stages.row_without_verdict(replace(job, attempt_no=start + 1), "not_run", "stopped"))
    in_hand = asked[0][1:3]
    assert asked[1][:2] == asked[2][:2] == in_hand and in_hand != asked[0][:2]
    assert set(opened.rows(["device_key"])["device_key"].to_pylist()) == {"d" * 64}


def test_equal_times_are_ordered_alike_in_every_start() -> None:
    even = [({"BM": n}, {"reason_code": "ok", "p50_s": 1.0, "ratio_p50": 1.0, "baseline_name": "x"}) for n in (64, 16, 32)]
    assert fastest_first(even) == fastest_first(even[::-1])


def test_choices_that_the_author_no_longer_offers_are_left_out(tmp_path) -> None:
    history = taught(tmp_path, row_of(SPEC, {"BM": 999, "BN": 64}, 1), row_of(SPEC, {"BLOCK": 64}, 2))
    machine = Machine()
    search(machine, 3, history=history)
    tiles = ordered_choices(RuleAuthor().code(SPEC, "sm_80"), find_target("sm_80"), {})
    assert all(c in tiles for c in machine.tried())
