"""Rows for the tests of the catalog: small, complete, and different in what the caller names."""

from __future__ import annotations

import hashlib
from typing import Any

from catalog.schema import make_row
from generator.spec import AttentionSpec, Rule

SPEC = AttentionSpec(8, 2, 64, 64, 1, 512, 512, masks=(Rule.make("causal", alignment="top_left"),), name="small")


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


DEVICE = sha("a device")


def attempt(key: int | str, reason_code: str = "wrong_value", **columns: Any) -> dict[str, Any]:
    """A row of attempt `key`."""
    base = {"attempt_key": sha(f"attempt {key}"), "reason_code": reason_code, "spec": SPEC, "target": "cpu", "device_key": DEVICE}
    return make_row(
        **{
            **base,
            "translator_version": "1",
            "harness_version": "1",
            "author": "rules",
            "program_hash": sha(f"p{key}"),
            **columns,
        }
    )


def verified(key: int | str, p50_s: float = 1e-3, **columns: Any) -> dict[str, Any]:
    """A row that could be served, with an interval of 1 % around its median."""
    held = {
        "source_hash": sha(f"source {key}"),
        "binary_hash": sha(f"binary {key}"),
        "launch": {"entry": "kernel"},
        "rule_id": "twice-plain",
        "verified_shapes": [(1, 512, 512), (1, 257, 257)],
        "p50_s": p50_s,
        "ci_low_s": p50_s * 0.99,
        "ci_high_s": p50_s * 1.01,
        "samples_s": [p50_s * 0.99, p50_s, p50_s * 1.01],
    }
    return attempt(key, "ok", **{**held, **columns})


def keys_of(cat, **options):
    return sorted(cat.rows(["attempt_key"], **options)["attempt_key"].to_pylist())


def part_files(cat):
    return sorted((cat.location.local / "rows").glob("*.parquet"))
