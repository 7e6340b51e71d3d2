"""What each stage's record becomes in a catalog row: column names and values. Decides nothing.

Functions take a record and give columns; those that also store an artifact take the store.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from catalog.artifacts import Artifacts
from catalog.locations import Location
from farm.devices import class_of
from farm.jobs import Job
from generator.canonical import digest_text
from generator.translate.records import Translated
from verifier.environment import DeviceKey, device_key, environment
from verifier.records import Binary, CaseError, Failed, Measurement, Passed, Verdict, Witness

Columns = dict[str, Any]
LOG_LIMIT = 64 * 1024


@functools.lru_cache(maxsize=8)
def artifacts_at(catalog: str) -> Artifacts:
    """The artifact store of a catalog's location."""
    return Artifacts(Location.of(catalog))


def of_texts(job: Job, store: Artifacts) -> Columns:
    """Sketch, code with holes, and the filled program, as far as there are any."""
    texts = {"sketch_hash": job.texts.get("sketch"), "tl_hash": job.texts.get("code"), "program_hash": job.program}
    return {name: store.put(text) for name, text in texts.items() if text}


def of_translated(translated: Translated, store: Artifacts) -> Columns:
    """Source, launch and schedule."""
    facts = translated.launch.target_facts
    return {
        "language": translated.language,
        "source_hash": store.put(translated.source),
        "launch": translated.launch,
        "schedule": translated.schedule,
        "entry_point": translated.launch.entry,
        "isa": [facts["isa"]] if "isa" in facts else None,
    }


def of_binary(binary: Binary, store: Artifacts) -> Columns:
    """The binary, what made it, and what the compiler says of its resources."""
    data = Path(binary.path).read_bytes()
    resources = binary.resources | ({"compiled_before_in_s": binary.compile_s} if binary.cached else {})
    columns: Columns = {
        "binary_hash": store.put(data),
        "binary_bytes": len(data),
        "compiler": binary.compiler,
        "compile_flags": list(binary.flags),
        "compile_s": 0.0 if binary.cached else binary.compile_s,
        "resources": resources,
        "cuda_toolkit": resources.get("cuda_toolkit"),
        "ptx_isa": resources.get("ptx_isa"),
    }
    for name in ("registers", "spill_bytes", "shared_bytes", "local_bytes"):
        columns[name] = resources.get(name)
    if (arch := resources.get("compiled_for")) is not None:  # what it really needs, whatever its target
        columns["isa"] = [arch]
    return columns | of_log(binary.log, store)


def of_log(log: str, store: Artifacts) -> Columns:
    """A log, its middle left out where it is longer than LOG_LIMIT bytes; nothing for an empty one."""
    if not log.strip():
        return {}
    data = log.encode()
    cut = data if len(data) <= LOG_LIMIT else data[: LOG_LIMIT // 2] + b"\n...\n" + data[-LOG_LIMIT // 2 :]
    return {"log_hash": store.put(cut), "log_truncated": len(cut) < len(data)}


def of_device(key: DeviceKey) -> Columns:
    """What a row may be used for, and this machine as it is."""
    facts = dict(key.facts)
    known = environment()
    columns: Columns = {
        "device_key": key.hash,
        "device": key,
        "device_name": key.name,
        "device_class": "cpu" if key.kind == "cpu" else class_of(key.name),
        "compute_capability": facts.get("compute_capability"),
        "sm_count": facts.get("sm_count"),
        "memory_bytes": facts.get("memory_bytes"),
        "cores": facts.get("cores"),
        "host_hash": known.get("host_hash"),
        "torch": known.get("torch"),
        "python": known.get("python"),
        "os": known.get("os"),
        "farm_version": known.get("farm"),
        "environment": known,
    }
    if (limit := facts.get("power_limit_w")) is not None:
        columns["power_limit_w"] = float(limit)
    if (mig := facts.get("mig")) is not None:
        columns["mig"] = str(mig)
    return columns


def of_gpu(device: str) -> Columns:
    """What is told of a GPU besides its key."""
    from verifier.gpu import driver_version, uuid_of

    return {"driver": driver_version(), "uuid_hash": digest_text(uuid_of(device))}


def of_borrowed(binary: Binary, own_isa: str, device_name: str) -> Columns:
    """Where a verdict comes from that was given on another architecture than the target's own."""
    arch = binary.resources.get("compiled_for")
    return {"verified_on": f"{device_name}, compiled for {arch}"} if arch not in (None, own_isa) else {}


def of_verdict(verdict: Verdict) -> Columns:
    """What was verified, and by how much; or the evidence against it."""
    match verdict:
        case Failed():
            return {"verify_s": verdict.verify_s} | of_witness(verdict.witness)
        case Passed():
            columns: Columns = {
                "rule_id": verdict.rule_id,
                "cases": verdict.cases,
                "verified_shapes": list(verdict.shapes),
                "seeds_count": verdict.seeds_count,
                "distributions": sorted({case.input_name for case in verdict.cases}),
                "reference_dtype": "fp64",
                "verify_s": verdict.verify_s,
                "inputs_unchanged": True,
                "poison_clean": True,
                "deterministic": True,
            }
            return columns | _worst(verdict.cases)


def _worst(cases: tuple[CaseError, ...]) -> Columns:
    """The case that came nearest to its limit, in the columns for one."""
    if not cases:
        return {}
    worst = max(cases, key=lambda c: max(_share(c.rms, c.limit_rms), _share(c.max_abs, c.limit_max_abs)))
    return {
        "max_abs": max(c.max_abs for c in cases),
        "rms_error": max(c.rms for c in cases),
        "trusted_rms": worst.trusted_rms,
        "trusted_max_abs": worst.trusted_max_abs,
        "limit_rms": worst.limit_rms,
        "limit_max_abs": worst.limit_max_abs,
    }


def _share(error: float, limit: float) -> float:
    return error / limit if limit else math.inf if error else 0.0


def of_witness(witness: Witness) -> Columns:
    """The evidence of a failure."""
    return {
        "witness_check": witness.check,
        "witness_input": witness.input_name,
        "witness_expected": witness.expected,
        "witness_found": witness.found,
    }


def of_measurement(m: Measurement) -> Columns:
    """Times of ours, and the best rival's of the same run."""
    ours = m.ours
    rivals = {r.name: {"p20_s": r.p20_s, "p50_s": r.p50_s, "p80_s": r.p80_s, "num_samples": len(r.samples_s)} for r in m.rivals}
    best = rivals.get(m.best_rival)
    columns: Columns = {
        "timing_method": m.method,
        "num_samples": len(ours.samples_s),
        "samples_s": list(ours.samples_s),
        "p20_s": ours.p20_s,
        "p50_s": ours.p50_s,
        "p80_s": ours.p80_s,
        "mean_s": sum(ours.samples_s) / max(1, len(ours.samples_s)),
        "num_threads": m.num_threads,
        "wall_vs_device": m.wall_vs_device,
        "interleaved": True,
        "rivals": {"measured": rivals, "unsupported": m.unsupported},
        "floor_s": m.floor_s,
        "plausible": ours.p50_s >= m.floor_s,
        "environment": m.environment,
    }
    columns |= _of_conditions(m.environment)
    if best is not None:
        columns |= {
            "baseline_name": m.best_rival,
            "baseline_p50_s": best["p50_s"],
            "ratio_p50": m.ratio_p50,
            "ratio_low": m.ratio_low,
            "ratio_high": m.ratio_high,
        }
    return columns


def _of_conditions(environment: dict[str, Any]) -> Columns:
    """What a GPU was like while it was timed."""
    gpu = environment.get("gpu")
    if gpu is None:
        return {}
    return {
        "clock_lock": gpu["clock_lock"],
        "sm_clock_before_mhz": float(gpu["before"]["sm_mhz"]),
        "sm_clock_after_mhz": float(gpu["after"]["sm_mhz"]),
        "temperature_c": float(gpu["after"]["temperature_c"]),
        "throttle_flags": gpu["reasons"],
        "l2_state": environment["l2"],
        "timed_iteration_checked": True,
    }


def fetched_path(cache: str | Path, name: str) -> Path:
    """Where this machine keeps a binary that was built elsewhere."""
    return Path(cache) / "fetched" / name[:2] / name


def present(binary: Binary, store: Artifacts, cache: Path) -> Binary:
    """The binary at a path of this machine: where it was built, or fetched from the catalog by its hash."""
    if Path(binary.path).is_file():
        return binary
    if (local := store.local_path(binary.hash)) is not None and local.is_file():
        return replace(binary, path=str(local))
    path = fetched_path(cache, binary.hash)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{id(binary)}.tmp")
        fresh.write_bytes(store.get(binary.hash))
        fresh.replace(path)
    return replace(binary, path=str(path))


@functools.lru_cache(maxsize=16)
def device_columns(device: str) -> tuple[tuple[str, Any], ...]:
    """What this machine says of a device; asked once a process."""
    return tuple((of_device(device_key(device)) | (of_gpu(device) if device != "cpu" else {})).items())


def last_error(log: str) -> str:
    """The line of a compiler's log that says most, for a row's message."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no output"])[0][:400]
