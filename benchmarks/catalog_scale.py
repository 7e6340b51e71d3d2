"""How long a catalog takes to open and to select from, by its size: 100,000 rows, a million rows, and 20,000 parts of one row.

    python benchmarks/catalog_scale.py --rows 100000 1000000 --parts 20000 --out benchmarks/results/catalog_scale.json

Rows are synthetic but whole: 64 problems on 8 devices, a third verified, with samples, cases, launch and environment of real
size. Each figure is the median of several repeats, an open of the catalog included. "warm" is in a process that has opened it
before; "new process" is a fresh Python that has imported pyarrow, with the files in the page cache. Judges nothing: the bars are
in docs/catalog.md.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from catalog import compaction, keys, marks, parts, schema, store
from catalog.snapshot import COMPACTED, MARKER, ROWS
from generator.canonical import digest_text
from generator.spec import AttentionSpec, Rule

REPEATS = 7
DEVICES = tuple(digest_text(f"device {i}") for i in range(8))
CAUSAL = (Rule.make("causal", alignment="top_left"),)
SPECS = tuple(
    AttentionSpec(heads, 8, dim, dim, 1, length, length, dtype=dtype, masks=masks, name="synthetic")
    for heads in (8, 32)
    for dim in (64, 128)
    for length in (512, 1024, 2048, 4096)
    for dtype in ("fp32", "bf16")
    for masks in ((), CAUSAL)
)


def templates() -> pa.Table:
    """Whole rows of each problem: verified, wrong, and not compiled."""
    base = {"target": "cpu", "translator_version": "1", "harness_version": "1", "author": "rules", "sweep_id": "scale"}
    environment = {"packages": {f"package{i}": f"1.{i}.0" for i in range(40)}}
    errors = ("rms", "max_abs", "trusted_rms", "trusted_max_abs", "limit_rms", "limit_max_abs")
    case = {"input_name": "random", **dict.fromkeys(errors, 1e-3)}
    made = []
    for number, spec in enumerate(SPECS):
        tensors = [{"name": n, "dtype": "f32", "offset_axes": 2, "axes": 2, "written": n == "O"} for n in "QKVO"]
        served = {
            "source_hash": digest_text(f"s{number}"),
            "binary_hash": digest_text(f"b{number}"),
            "rule_id": "twice-plain",
            "launch": {"entry": "kernel", "tensors": tensors},
            "verified_shapes": [(1, spec.seqlen_q, spec.seqlen_k), (1, spec.seqlen_q // 2 + 1, spec.seqlen_k // 2 + 1)],
            "cases": [case] * 12,
            "baseline_name": "torch sdpa",
            "samples_s": [1e-3] * 30,
        }
        schedule = {"tiles": [64, 64], "notes": ["a decision of the translator, in a sentence"] * 6}
        common = {
            **base,
            "spec": spec,
            "environment": environment,
            "schedule": schedule,
            "program_hash": digest_text(f"p{number}"),
        }
        for reason in ("ok", "wrong_value", "compile_error"):
            found = served if reason == "ok" else {"message": "off at row 3"}
            row = schema.make_row(attempt_key="0" * 64, device_key=DEVICES[0], reason_code=reason, **common, **found)
            made.append(schema.seal_row(row, run_id="r", writer_id="w", sequence=0))
    return pa.Table.from_pylist(made, schema=schema.SCHEMA)


def table_of(start: int, count: int, one_of_each: pa.Table) -> pa.Table:
    """Rows [start, start + count): the templates in turn, with keys, devices and times of their own."""
    numbers = np.arange(start, start + count)
    random = np.random.default_rng(start)
    table = one_of_each.take(pa.array(numbers % one_of_each.num_rows))
    attempts = [digest_text(f"attempt {n}") for n in numbers]
    ok = np.asarray(table["reason_code"].to_pylist()) == "ok"
    times = np.where(ok, random.lognormal(-7, 0.3, count), np.nan)
    samples = [list(t * random.lognormal(0, 0.01, 30)) if good else None for t, good in zip(times, ok, strict=True)]
    fresh = {
        "attempt_key": pa.array(attempts),
        "row_id": pa.array([keys.row_id(key, 1, "r") for key in attempts]),
        "sequence": pa.array(numbers + 1),
        "device_key": pa.array([DEVICES[(n // 7) % len(DEVICES)] for n in numbers]),
        "p50_s": pa.array(times, from_pandas=True),
        "ci_low_s": pa.array(times * 0.99, from_pandas=True),
        "ci_high_s": pa.array(times * 1.01, from_pandas=True),
        "samples_s": pa.array(samples, pa.list_(pa.float64())),
    }
    for name, values in fresh.items():
        table = table.set_column(table.schema.get_field_index(name), schema.SCHEMA.field(name), values)
    return table


def build_compacted(folder: Path, rows: int) -> store.Catalog:
    """A catalog of so many rows as compaction leaves it, part by part."""
    cat = store.open(folder, create=True)
    one_of_each = templates()
    names = []
    for number, start in enumerate(range(0, rows, compaction.ROWS_PER_PART)):
        table = table_of(start, min(compaction.ROWS_PER_PART, rows - start), one_of_each)
        names.append(str(parts.publish(cat.location, ROWS, f"{COMPACTED}.scale.{number:06d}", table, compacted=True)))
    marks.commit(cat.location, marks.Compaction(1, tuple(names), (), (), rows))
    return cat


def build_loose(folder: Path, rows: int, rows_a_part: int) -> store.Catalog:
    """Loose parts, without waiting for the disk at each."""
    cat = store.open(folder, create=True)
    table = table_of(0, rows, templates())
    wait, os.fsync = os.fsync, lambda descriptor: None
    try:
        for number, start in enumerate(range(0, rows, rows_a_part)):
            parts.publish(cat.location, ROWS, f"r.w.{number:06d}", table.slice(start, rows_a_part))
    finally:
        os.fsync = wait
    return cat


def selections(uri: str) -> dict[str, Callable[[], Any]]:
    """What is timed, each with an open of its own."""
    spec, device = SPECS[5], DEVICES[3]
    hot = ["row_id", "p50_s", "binary_hash"]
    family = {"family_hash": spec.family_hash, "device_key": device, "status": "ok"}
    row_id = keys.row_id(digest_text("attempt 77"), 1, "r")
    return {
        "rows of one family and device": lambda: store.open(uri).rows(hot, family),
        "best of one spec and device": lambda: store.open(uri).best(spec, device_key=device),
        "every verified row of one device": lambda: store.open(uri).rows(hot, {"device_key": device, "status": "ok"}),
        "reason of every row": lambda: store.open(uri).rows(["reason_code"]),
        "one row by its id": lambda: store.open(uri).get(row_id),
        "resume index of every row": lambda: store.open(uri).resume(),
    }


def timed(call: Callable[[], Any], repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each repeat: by the clock, and of CPU time (of all threads)."""
    wall, cpu = [], []
    for _ in range(repeats):
        start, start_cpu = time.perf_counter(), time.process_time()
        call()
        wall.append(round(1e3 * (time.perf_counter() - start), 2))
        cpu.append(round(1e3 * (time.process_time() - start_cpu), 2))
    return wall, cpu


_CHILD = """
import json, sys, time
import pyarrow.dataset, pyarrow.parquet, numpy
sys.path.insert(0, {path!r})
import catalog_scale
def resident():  # getrusage would give the parent's where that is larger
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
base = resident()
call = catalog_scale.selections({uri!r})[{name!r}]
start = time.perf_counter(); call(); taken = 1e3 * (time.perf_counter() - start)
print(json.dumps([taken, base, resident()]))
"""


def in_new_process(uri: str, name: str) -> list[float]:
    """Milliseconds, resident MiB after the imports, and the largest resident MiB."""
    code = _CHILD.format(path=str(Path(__file__).parent), uri=uri, name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [round(value, 1) for value in json.loads(done.stdout)]


def measure(cat: store.Catalog, repeats: int) -> dict[str, Any]:
    results = {}
    for name, call in selections(cat.uri).items():
        call()
        warm, cpu = timed(call, repeats)
        fresh = [in_new_process(cat.uri, name) for _ in range(3)]
        held = {
            "warm_ms": statistics.median(warm),
            "warm_ms_each": warm,
            "warm_cpu_ms": statistics.median(cpu),
            "new_process_ms": statistics.median(f[0] for f in fresh),
            "resident_mib_after_imports": max(f[1] for f in fresh),
            "resident_mib_peak": max(f[2] for f in fresh),
        }
        memory = f"{held['resident_mib_peak']} MiB (imports alone {held['resident_mib_after_imports']})"
        warm_text = f"{held['warm_ms']} ms warm ({held['warm_cpu_ms']} of CPU)"
        print(f"  {name}: {warm_text}, {held['new_process_ms']} ms in a new process, {memory}", flush=True)
        results[name] = held
    return results


def size_mib(cat: store.Catalog) -> float:
    return round(sum(entry.size for entry in cat.location.files(ROWS)) / 2**20, 1)


def tiny_parts(folder: Path, number: int) -> dict[str, Any]:
    """Before compaction, the compaction, and after it."""
    cat = kept(folder / f"tiny-{number}", lambda path: build_loose(path, number, 1))
    print(f"{number} parts of one row, {size_mib(cat)} MiB")
    before = measure(cat, 3)
    copy = folder / "tiny-compacted"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / f"tiny-{number}", copy)
    cat = store.open(copy)
    (taken,), _ = timed(lambda: compaction.compact(cat), 1)
    print(f"  compaction: {taken / 1e3:.1f} s; after it:")
    after = measure(cat, 3)
    shutil.rmtree(copy)
    return {"before": before, "compaction_ms": taken, "after": after}


def kept(path: Path, build: Callable[[Path], store.Catalog]) -> store.Catalog:
    return store.open(path) if (path / MARKER).exists() else build(path)


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cpu": next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "load_average": os.getloadavg()[0],
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", type=int, nargs="*", default=[100_000, 1_000_000])
    arguments.add_argument("--parts", type=int, default=20_000, help="parts of one row; 0 for none")
    arguments.add_argument("--folder", type=Path, default=None, help="keep the catalogs here, and use those that are there")
    arguments.add_argument("--out", type=Path, default=None)
    options = arguments.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="catalog-scale-"))
    results: dict[str, Any] = {"machine": machine(), "repeats": REPEATS}
    try:
        for rows in options.rows:
            cat = kept(folder / f"compacted-{rows}", lambda path, rows=rows: build_compacted(path, rows))
            print(f"{rows} rows, compacted, {size_mib(cat)} MiB")
            results[f"{rows} rows, compacted"] = {"mib": size_mib(cat), "selections": measure(cat, REPEATS)}
        if options.parts:
            results[f"{options.parts} parts of one row"] = tiny_parts(folder, options.parts)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
