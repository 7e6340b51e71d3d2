"""Our CUDA prefill kernels against the libraries' on this machine's GPU, cell by cell against the bars. No full check of values.

    python benchmarks/gpu_prefill.py --out FOLDER [--rows sm_90a,sm_80,sm_75,variants] [--process 3] [--budget-s 470]
    python benchmarks/gpu_prefill.py --out FOLDER --resume            # what a run that was ended has not measured

For each kind of call the author's tile sizes, then hints are searched by measured halving; the winner is compared with float64
on sampled rows, then timed against a rival, call by call in turn, on a card at work, in several processes. The median of the
processes counts. FOLDER gets `prefill.json` (every cell), `samples.json` (every single time), `table.txt` and `searched.json`
(what the searches found, which later runs of the same kernels on the same kind of card use: `--searched FILE`).
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import gpu_cases as cases  # noqa: E402
import gpu_flex  # noqa: E402
from gpu_cells import BARS, Cell, Job, cells  # noqa: E402
from gpu_kernels import Kernel, environment, log, place_of  # noqa: E402
from gpu_search import Built, Effort, read_findings, winners_of, write_findings, write_whole  # noqa: E402
from gpu_timing import in_turns, opponents, sampled_error, streamed  # noqa: E402

START = time.monotonic()
RMS_LIMIT = {"bf16": 6e-3, "fp16": 1.2e-3}
SAVE_EVERY_S = 8.0
SAME_IN_ALL_RUNS = ("rows", "cells", "rounds", "heat_s", "candidates", "hints")
Results = dict[Cell, list[Any]]  # of each process: a dict of what was measured, or why there is nothing


def time_cell(cell: Cell, ours: Built, rounds: int, heat_s: float) -> dict[str, Any]:
    """Milliseconds of ours and the rival's calls, and the error of ours on sampled rows."""
    import torch

    s = cell.spec
    names = (cell.rival, *cell.beside)
    sets, rivals = opponents(torch, s, names)
    kernel = Kernel(ours[1], ours[2])
    calls: dict[str, list[Callable[[], Any]]] = {"ours": [kernel.prepared(s, x) for x in sets]}
    calls |= {n: [r.calls[n] for r in rivals] for n in names if all(n in r.calls for r in rivals)}
    times = in_turns(torch, calls, rounds, heat_s)
    return {"kernel": ours[0], "ms": times, "rms": sampled_error(torch, s, sets[0]), "unsupported": rivals[0].unsupported}


def quantiles(ms: Sequence[float]) -> dict[str, float]:
    ordered = sorted(ms)
    at = {"q10": 0.1, "median": 0.5, "q90": 0.9}
    return {k: round(ordered[min(len(ordered) - 1, int(p * len(ordered)))], 5) for k, p in at.items()}


def merged(cell: Cell, runs: Sequence[Any]) -> dict[str, Any]:
    """One cell over processes: times of each, the ratio of the median process, errors as they were."""
    s, good = cell.spec, [r for r in runs if isinstance(r, dict)]
    out: dict[str, Any] = {
        "cell": cell.name,
        "row": cell.row,
        "rival": cell.rival,
        "has_bar": cell.has_bar,
        "processes": len(good),
    }
    out["errors"] = [r for r in runs if isinstance(r, str)]
    if not good:
        return out
    work = cases.flops(s, cases.visible_pairs(s)) / 1e9
    out |= {"kernel": good[0]["kernel"], "rms": max(r["rms"] for r in good), "unsupported": good[0]["unsupported"]}
    out["right"] = out["rms"] <= RMS_LIMIT[s.dtype]
    for n in ("ours", cell.rival, *cell.beside):
        medians = [statistics.median(r["ms"][n]) for r in good if n in r["ms"]]
        if medians:
            out[n] = {"tflops": round(work / statistics.median(medians), 1), "ms": [quantiles(r["ms"][n]) for r in good]}
    out |= ratios(good, cell.rival)
    if beside := {n: found for n in cell.beside if (found := ratios(good, n))}:
        out["beside"] = beside
    return out


def ratios(runs: Sequence[dict[str, Any]], rival: str) -> dict[str, Any]:
    """A rival's time over ours, of each process and of the median one."""
    found = [statistics.median(r["ms"][rival]) / statistics.median(r["ms"]["ours"]) for r in runs if rival in r["ms"]]
    return {"ratio": round(statistics.median(found), 4), "ratios": [round(r, 4) for r in found]} if found else {}


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """A line per cell, then per row the worst cell and the geometric mean beside the bar."""
    lines, found = [], sorted(found, key=_place_in_table)
    for c in found:
        if "kernel" not in c:
            lines.append(f"{c['cell']:48s} {c['errors'][:1]}")
            continue
        of = {c["rival"]: c.get("ratio"), **{n: x["ratio"] for n, x in c.get("beside", {}).items()}}
        beside = [f"{n} {c[n]['tflops']:6.1f}  ratio {ratio:.3f}" for n, ratio in of.items() if ratio]
        tiles = c["kernel"].split("_BM")[-1]
        wrong = "" if c["right"] else f"  WRONG {c['rms']:.1e}"
        lines.append(f"{c['cell']:48s} ours {c['ours']['tflops']:6.1f}  {'  '.join(beside) or c['unsupported']}  {tiles}{wrong}")
    for row in dict.fromkeys(c["row"] for c in found):
        of_row = [c for c in found if c["row"] == row]
        barred = [c for c in of_row if c["has_bar"]]
        lines.append(_verdict(row, BARS[row], [(c["ratio"], c["cell"]) for c in barred if "ratio" in c], len(barred)))
        for n in dict.fromkeys(n for c in of_row for n in c.get("beside", {})):
            others = [(c["beside"][n]["ratio"], c["cell"]) for c in of_row if n in c.get("beside", {})]
            lines.append(_verdict(f"{row}, {n}", BARS[row], others, len(of_row)))
    return lines


def _place_in_table(c: Mapping[str, Any]) -> tuple[int, str, int]:
    """Rows as their bars are listed, one kind of call after another, short calls first."""
    kind, size = c["cell"].rsplit(" ", 1)
    _, heads, seqlen = size.split("x")
    return list(BARS).index(c["row"]), f"{kind} {heads}", int(seqlen)


def _verdict(row: str, bars: tuple[float, float], ratios: Sequence[tuple[float, str]], cells: int) -> str:
    if not ratios:
        return f"== {row}: no cell"
    (worst, where), mean = min(ratios), math.exp(statistics.fmean(math.log(r) for r, _ in ratios))
    bar, mean_bar = bars
    verdict = "met" if worst >= bar and mean >= mean_bar else "MISSED"
    below, missing = sum(r < bar for r, _ in ratios), cells - len(ratios)
    return (
        f"== {row}: {verdict}; worst {worst:.3f} ({where}), {below} of {len(ratios)} below {bar}; "
        f"mean {mean:.3f} (bar {mean_bar})" + (f"; {missing} cells without a ratio" if missing else "")
    )


def continued(stored: Mapping[str, Sequence[Any]], chosen: Sequence[Cell], winners: Mapping[Job, Built], place: str) -> Results:
    """What counts of an earlier run: times in the same place of the very kernels that would be timed now.

    Errors are left out, so that they are tried again, and so are times of a kernel whose text was another.
    """
    out: Results = {}
    for cell in chosen:
        ours = winners.get(cell.job)
        old = [r for r in stored.get(cell.name, ()) if isinstance(r, dict)]
        out[cell] = [r for r in old if ours and r.get("place") == place and r.get("text") == ours[1].hash]
    return out


def missing(results: Results, winners: Mapping[Job, Built], process: int) -> list[Cell]:
    """Cells, in their order, that a process has to time, so that each has the results of `process` processes."""
    return [cell for cell, own in results.items() if cell.job in winners and len(own) < process]


def share_of_time(results: Results, winners: Mapping[Job, Built], processes: int, process: int, left_s: float) -> float:
    """Seconds for one process of those that still have something to do, by how much each has."""
    work = [len(missing(results, winners, n)) for n in range(process, processes + 1)]
    return left_s * work[0] / max(1, sum(work))


def write(out: Path, facts: Mapping[str, Any], runs: Sequence[Any], results: Results) -> list[str]:
    """All files of the folder but the searches' findings; the table's lines."""
    found = [merged(c, r) for c, r in results.items() if r]
    lines = table(found)
    write_whole(out / "prefill.json", json.dumps({**facts, "runs": runs, "cells": found}, indent=1))
    write_whole(out / "samples.json", json.dumps({c.name: r for c, r in results.items()}))
    write_whole(out / "table.txt", "\n".join(lines) + "\n")
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for the files")
    parser.add_argument("--rows", default="sm_90a,sm_80,sm_75,variants", help="rows of the table")
    parser.add_argument("--cells", default="*", help="only cells whose name matches, e.g. '*bf16 d128*'")
    parser.add_argument("--process", type=int, default=3, help="processes; the median of them counts")
    parser.add_argument("--rounds", type=int, default=16, help="timed calls of each contestant in a cell")
    parser.add_argument("--heat-s", type=float, default=0.2, help="seconds of turns before the timed ones")
    parser.add_argument("--candidates", type=int, default=6, help="choices of tile sizes for each kind of call")
    parser.add_argument("--hints", type=int, default=2, help="hints tried with the best tile sizes of each kind of call")
    parser.add_argument("--searched", help="file of findings to use and to add to (default: searched.json in the folder)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in the folder: only what it has not measured")
    parser.add_argument("--budget-s", type=float, default=470)
    return parser.parse_args()


def earlier(out: Path, options: argparse.Namespace) -> tuple[list[Any], dict[str, list[Any]]]:
    """Facts of the runs and the results that a folder holds; a run goes on with the selection and the ways that it began with.

    SystemExit where the folder does not go with what was asked.
    """
    samples, found = out / "samples.json", out / "prefill.json"
    if not options.resume and samples.exists():
        raise SystemExit(f"--out: {out} holds a run already; --resume goes on with it, or name another folder")
    if not options.resume or not samples.exists():
        return [], {}
    try:
        runs, stored = json.loads(found.read_text())["runs"], json.loads(samples.read_text())
        for name in SAME_IN_ALL_RUNS:
            setattr(options, name, runs[0]["arguments"][name])
    except (OSError, ValueError, LookupError) as error:
        raise SystemExit(f"--resume: {out} holds no run that can be gone on with ({error!r}); name another folder") from None
    return runs, stored


def measured(
    results: Results, winners: Mapping[Job, Built], options: argparse.Namespace, more: Mapping[str, Any]
) -> Iterator[None]:
    """Adds to the results what each process measures, with `more` beside it; after each cell the caller has a turn."""
    end = START + options.budget_s

    def work(cell: Cell) -> dict[str, Any]:
        began, ours = time.monotonic(), winners[cell.job]
        found = time_cell(cell, ours, options.rounds, options.heat_s)
        return {**found, "text": ours[1].hash, "took_s": round(time.monotonic() - began, 3), **more}

    for n in range(1, options.process + 1):
        todo = missing(results, winners, n)
        log(f"process {n} of {options.process}: {len(todo)} cells")
        now = time.monotonic()
        deadline = now + share_of_time(results, winners, options.process, n, end - now)
        for cell, result in streamed(work, todo, 60, deadline):
            results[cell].append(result)
            if isinstance(result, str):
                log("  ", cell.name, result)
            yield


def main() -> None:
    options = arguments()
    import torch  # noqa: F401 - before children fork; touches no device

    out = Path(options.out)
    runs, stored = earlier(out, options)
    facts = environment() | {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    place = place_of(facts)
    runs = [
        *runs,
        facts | {"place": place, "arguments": {k: v for k, v in vars(options).items() if k not in ("out", "searched")}},
    ]
    log(runs[-1])
    chosen = [c for c in cells(options.rows.split(",")) if fnmatch.fnmatch(c.name, options.cells)]
    files = [out / "searched.json", *([Path(options.searched)] if options.searched else [])]
    effort = Effort(options.candidates, options.hints, options.heat_s, START + options.budget_s / 3, START + options.budget_s / 2)
    winners, findings = winners_of(chosen, effort, place, [f for path in files for f in read_findings(path)])
    for path in files:
        write_findings(path, findings)
    results = continued(stored, chosen, winners, place)
    kept, old = sum(map(len, results.values())), sum(map(len, stored.values()))
    log(f"{len(chosen)} cells; {kept} of {old} results of earlier runs count")
    saved = time.monotonic()
    with gpu_flex.compiled_once():
        for _ in measured(results, winners, options, {"place": place, "run": len(runs) - 1}):
            if time.monotonic() - saved > SAVE_EVERY_S:
                write(out, facts, runs, results)
                saved = time.monotonic()
    lines = write(out, facts, runs, results)
    log("done")
    print("\n" + "\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
