"""The prefill benchmark without a GPU: the order of its cells, findings used again, runs that go on. Times are made up."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from generator.translate.records import Translated
from verifier.records import Binary

FOLDER = Path(__file__).parents[2] / "benchmarks"
ROWS = ["sm_90a", "sm_80", "sm_75", "variants"]
HERE = "card A, driver 1, torch 2, CUDA 13, NVRTC 13"


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, ModuleType]]:
    """The benchmark's modules by name."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in ("gpu_prefill", "gpu_search", "gpu_cells", "gpu_kernels")}
    finally:
        sys.path.remove(str(FOLDER))


def test_the_table_has_every_cell_once_and_cells_of_one_job_share_its_search(bench: dict[str, ModuleType]) -> None:
    cells = bench["gpu_cells"].cells(ROWS)
    assert Counter(c.row for c in cells) == {"sm_90a": 128, "sm_80": 40, "sm_75": 20, "variants sm_90a": 5, "variants sm_80": 5}
    assert len({c.name for c in cells}) == len(cells)
    jobs = bench["gpu_search"].searches(cells)
    assert {c.job for c in cells} == set(jobs) and len(jobs) == 66


def test_a_rows_verdict_is_on_the_cells_that_have_a_bar(bench: dict[str, ModuleType]) -> None:
    own = [c for c in bench["gpu_cells"].cells(["variants"]) if c.row == "variants sm_90a"]
    assert sorted(c.spec.masks[0].name for c in own if not c.has_bar) == ["document", "prefix"]
    times = {"ours": [1.0], "flex": [1.5]}
    found = []
    for cell in own:
        ms = times | ({"flex": [1.9]} if cell.has_bar else {})
        run = {"kernel": "x_BM128", "rms": 0.0, "unsupported": [], "ms": ms}
        found.append(bench["gpu_prefill"].merged(cell, [run]))
    assert "variants sm_90a: met; worst 1.900" in bench["gpu_prefill"].table(found)[-1]


@pytest.mark.parametrize("done", [50, 100, 150])
def test_whatever_part_of_the_cells_time_allows_has_some_of_every_group(bench: dict[str, ModuleType], done: int) -> None:
    cells = bench["gpu_cells"].cells(ROWS)
    for row, total in Counter(c.row for c in cells).items():
        own = [c for c in cells[:done] if c.row == row]
        assert abs(len(own) - total * done / len(cells)) <= 1.6, row
    own = [c for c in cells[:done] if c.row == "sm_90a"]
    groups = {(c.kind, c.spec.group) for c in cells if c.row == "sm_90a"}
    assert len(groups) == 32 and len({(c.kind, c.spec.group) for c in own}) >= min(32, len(own))
    lengths = Counter(c.spec.seqlen_q for c in own)
    assert max(lengths.values()) - min(lengths.values()) <= 1
    dims = {(c.spec.head_dim, c.spec.seqlen_q) for c in own}
    assert len(dims) == 16, "each head dim at each length"


def test_a_variant_is_timed_on_both_targets_in_a_row(bench: dict[str, ModuleType]) -> None:
    cells = bench["gpu_cells"].cells(ROWS)
    at = [i for i, c in enumerate(cells) if c.rival == "flex"]
    assert all(b == a + 1 and cells[a].spec == cells[b].spec for a, b in zip(at[::2], at[1::2], strict=True))


class Machine:
    """Stands in for compiler and card: kernels have texts, searches have an answer, and both are counted."""

    def __init__(self, bench: dict[str, ModuleType], patch: pytest.MonkeyPatch) -> None:
        self.search, self.searched = bench["gpu_search"], 0
        self.texts: dict[str, str] = {}
        self.compiled: list[Any] = []
        patch.setattr(self.search, "texts_of", lambda builds: {b: self.text(b) for b in builds})
        patch.setattr(self.search, "compile_every", self.compile)
        patch.setattr(self.search, "search", self.halve)

    def text(self, b: Any) -> str:
        return self.texts.get(b.name, f"text of {b.target} {b.name}")

    def compile(self, builds: Sequence[Any]) -> dict[Any, Any]:
        self.compiled += builds
        binary = Binary("", "0" * 64, "0" * 64, "sm_75", "NVRTC", (), 0.0, {}, "")
        return {b: (b.name, Translated(b.target, "cuda", self.text(b), None, "", {}), binary) for b in builds}  # type: ignore[arg-type]

    def halve(self, jobs: Any, built: Any, heat_s: float, deadline: float) -> dict[Any, Any]:
        self.searched += len(jobs)
        return {job: built[job][-1] for job in jobs}

    def winners(self, cells: Any, known: Any, place: str = HERE, hints: int = 2) -> Any:
        self.compiled, self.searched = [], 0
        return self.search.winners_of(cells, self.search.Effort(3, hints, 0.1, 1e12, 1e12), place, known)


@pytest.fixture
def machine(bench: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(bench, monkeypatch)


@pytest.fixture
def few(bench: dict[str, ModuleType]) -> Any:
    return [c for c in bench["gpu_cells"].cells(["sm_75"]) if c.spec.head_dim == 64 and c.spec.masks]


def test_findings_are_used_again_and_only_the_winners_are_compiled(machine: Machine, few: Any, tmp_path: Path) -> None:
    winners, findings = machine.winners(few, [])
    assert machine.searched == 2 * 2, "one kind of call, short and long, tile sizes and hints"
    machine.search.write_findings(tmp_path / "found.json", findings)
    known = machine.search.read_findings(tmp_path / "found.json")
    assert known == findings
    again, same = machine.winners(few, known)
    assert machine.searched == 0 and again == winners and same == findings
    assert {b.name for b in machine.compiled} == {b[0] for b in winners.values()}


@pytest.mark.parametrize("what", ["tile", "hint", "place", "hints", "cut"])
def test_a_finding_is_not_used_once_anything_it_rests_on_is_another(machine: Machine, few: Any, what: str) -> None:
    _, findings = machine.winners(few, [])
    changed: dict[str, Any] = {}
    match what:
        case "tile":
            machine.texts[next(iter(findings[0].tiles))] = "another text"
        case "hint":
            machine.texts[next(iter(findings[0].hints))] = "another text"
        case "place":
            changed["place"] = HERE.replace("driver 1", "driver 2")
        case "hints":
            changed["hints"] = 1
        case "cut":
            findings = [replace(f, winner="") for f in findings]
    machine.winners(few, findings, **changed)
    assert machine.searched == 2 * 2


def test_newer_findings_take_the_place_of_older_ones_and_others_stay(machine: Machine, few: Any, tmp_path: Path) -> None:
    _, findings = machine.winners(few, [])
    path = tmp_path / "found.json"
    machine.search.write_findings(path, findings)
    machine.search.write_findings(path, [replace(findings[0], winner="better"), replace(findings[1], place="elsewhere")])
    found = machine.search.read_findings(path)
    assert [f.winner == "better" for f in found] == [True, False, False] and len(found) == 3
    path.write_text("[1]")
    with pytest.raises(SystemExit, match="expected findings of an earlier search"):
        machine.search.read_findings(path)


@pytest.fixture
def run(bench: dict[str, ModuleType], machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Runs the benchmark on one sm_75 group, ended after a number of cells; the calls, and what the folder holds then."""
    prefill, timed = bench["gpu_prefill"], []

    def time_cell(cell: Any, ours: Any, rounds: int, heat_s: float) -> dict[str, Any]:
        timed.append(cell.name)
        times = {"ours": [1.0] * rounds, cell.rival: [2.0] * rounds}
        return {"kernel": ours[0], "ms": times, "rms": 0.0, "unsupported": {}}

    def go(*arguments: str, ended_after: int = 1000) -> tuple[list[str], dict[str, Any]]:
        timed.clear()

        def streamed(work: Any, items: Any, limit_s: float, deadline: float) -> Iterator[Any]:
            for item in items:
                if len(timed) == ended_after:
                    raise KeyboardInterrupt
                yield item, work(item)

        monkeypatch.setattr(prefill, "streamed", streamed)
        argv = ["gpu_prefill.py", "--out", str(tmp_path / "run"), "--candidates", "3", *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(KeyboardInterrupt) if ended_after < 1000 else monkeypatch.context():
            prefill.main()
        return list(timed), {n: json.loads((tmp_path / "run" / f"{n}.json").read_text()) for n in ("prefill", "samples")}

    monkeypatch.setattr(prefill, "time_cell", time_cell)
    monkeypatch.setattr(prefill, "SAVE_EVERY_S", -1.0)
    return go


SELECTED = ("--rows", "sm_75", "--cells", "*d64 causal*")


def test_a_run_that_was_ended_goes_on_with_what_it_has_not_measured(run: Callable[..., Any], machine: Machine) -> None:
    first, found = run(*SELECTED, ended_after=7)
    assert len(found["samples"]) == 5 and len(set(first)) == 5, "each cell once, then two of them in a second process"
    second, found = run("--resume")
    assert machine.searched == 4, "by the first run: the second found its findings in the folder"
    assert Counter(first + second) == dict.fromkeys(found["samples"], 3)
    assert [r["run"] for own in found["samples"].values() for r in own].count(0) == 7
    assert [c["processes"] for c in found["prefill"]["cells"]] == [3] * 5 and len(found["prefill"]["runs"]) == 2
    assert {c["ratio"] for c in found["prefill"]["cells"]} == {2.0}
    third, _ = run("--resume")
    assert third == [], "there is nothing left"


def test_times_of_an_older_kernel_or_of_another_card_are_measured_again(
    run: Callable[..., Any], machine: Machine, bench: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(*SELECTED)
    machine.text = lambda b: f"newer text of {b.name}"  # type: ignore[method-assign]
    newer, found = run("--resume")
    assert len(newer) == 15 and {len(own) for own in found["samples"].values()} == {3}
    monkeypatch.setattr(bench["gpu_prefill"], "place_of", lambda facts: "another card")
    elsewhere, _ = run("--resume")
    assert len(elsewhere) == 15


def test_errors_are_tried_again_and_a_folder_with_a_run_is_not_written_over(
    run: Callable[..., Any], bench: dict[str, ModuleType], tmp_path: Path
) -> None:
    run(*SELECTED, "--process", "1")
    path = tmp_path / "run" / "samples.json"
    stored = json.loads(path.read_text())
    failed = next(iter(stored))
    path.write_text(json.dumps(stored | {failed: ["no answer: the process hung for 60 s or died"]}))
    again, found = run("--resume", "--process", "1")
    assert again == [failed] and found["samples"][failed][0]["kernel"]
    with pytest.raises(SystemExit, match="holds a run already; --resume goes on with it"):
        run(*SELECTED)
    path.write_text("no JSON")
    with pytest.raises(SystemExit, match="holds no run that can be gone on with"):
        run("--resume")


def test_processes_share_the_time_that_is_left_by_what_they_have_to_do(bench: dict[str, ModuleType], few: Any) -> None:
    prefill = bench["gpu_prefill"]
    winners = {c.job: ("", None, None) for c in few}
    results: dict[Any, list[Any]] = {c: [] for c in few}
    assert prefill.share_of_time(results, winners, 3, 1, 300.0) == 100.0
    results[few[0]] = results[few[1]] = [{}, {}, {}]
    assert prefill.share_of_time(results, winners, 3, 3, 90.0) == 90.0
    for c in few:
        results[c] = results[c] or [{}]
    assert prefill.missing(results, winners, 1) == [] and len(prefill.missing(results, winners, 2)) == len(few) - 2
    assert prefill.share_of_time(results, winners, 3, 1, 300.0) == 0.0
