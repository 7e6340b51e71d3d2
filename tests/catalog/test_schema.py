"""Rows are checked column by column: types, closed lists, time zones, and what follows from a spec."""

import datetime as dt
import subprocess
import sys

import pyarrow as pa
import pytest

from catalog.keys import ShapeBucket, attempt_key, power_bucket, row_id
from catalog.schema import COLUMNS, GROUPS, SCHEMA, SCHEMA_VERSION, RowError, make_row, seal_row, status_of
from generator.spec import AttentionSpec, Rule
from verifier.records import REASONS, CaseError

SPEC = AttentionSpec(32, 8, 128, 128, 1, 500, 500, dtype="bf16", masks=(Rule.make("window", left=255, right=0),), name="mistral")
HASH = "0" * 64
BASE = {
    "attempt_key": "a" * 64,
    "reason_code": "wrong_value",
    "spec": SPEC,
    "target": "cpu",
    "translator_version": "1",
    "harness_version": "1",
}


def test_schema_is_explicit_and_carries_its_version():
    assert SCHEMA.names == list(COLUMNS) and len(set(SCHEMA.names)) == len(SCHEMA.names)
    assert SCHEMA.metadata[b"kernel_farm_schema_version"] == str(SCHEMA_VERSION).encode()
    assert SCHEMA.field("created_at").type == pa.timestamp("us", tz="UTC")
    assert sum(len(names) for names in GROUPS.values()) == len(COLUMNS)


def test_a_row_has_every_column_and_fits_arrow():
    row = make_row(**BASE, samples_s=[1e-3, 2e-3], launch={"entry": "k"}, cases=(CaseError("random", 1, 2, 3, 4, 5, 6),))
    assert list(row) == list(COLUMNS)
    assert (row["status"], row["attempt_no"], row["shape_bucket"]) == ("failed", 1, "b1_q512_k512")
    assert (row["num_heads"], row["head_layout"], row["masks"], row["spec_name"]) == (
        32,
        "gqa",
        "window(left=255, right=0)",
        "mistral",
    )
    table = pa.Table.from_pylist([row], schema=SCHEMA)
    assert table["cases"][0].as_py()[0]["limit_max_abs"] == 6.0 and table["launch"][0].as_py() == '{"entry":"k"}'


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"binry_hash": HASH}, "binry_hash: no such column; did you mean binary_hash?"),
        ({"binary_hash": "xyz"}, "binary_hash: expected 64 hex digits (a SHA-256), found 'xyz'"),
        ({"reason_code": "bad luck"}, "reason_code: expected one of ok, tl_rejected"),
        ({"status": "ok"}, "status: expected 'failed', which follows from reason_code 'wrong_value', found 'ok'"),
        ({"num_heads": 8}, "num_heads: expected 32, which follows from spec, found 8"),
        ({"p50_s": "fast"}, "p50_s: expected a number, found 'fast'"),
        ({"compile_s": -1.0}, "compile_s: expected a number of at least 0, found -1.0"),
        ({"seeds_count": True}, "seeds_count: expected a whole number of 64 bits, found True"),
        ({"launch": "{"}, "launch: expected JSON text"),
        ({"samples_s": [1, "2"]}, "samples_s[1]: expected a number, found '2'"),
        ({"verified_shapes": [(1, 2)]}, "verified_shapes[0]: expected the fields batch, seqlen_q, seqlen_k"),
        ({"row_id": "1"}, "row_id: is filled in by the writer"),
        ({"target": None}, "target: missing"),
        ({"spec": "{}"}, "spec: expected an AttentionSpec or its JSON"),
        ({"reason_code": "ok"}, "binary_hash: missing; a row with reason_code 'ok' needs it"),
    ],
)
def test_a_wrong_column_is_named(columns, message):
    with pytest.raises(RowError) as caught:
        make_row(**{**BASE, **columns})
    assert message in str(caught.value)


def test_all_wrong_columns_are_named_at_once():
    with pytest.raises(RowError, match="(?s)nothing: no such column.*p50_s: expected a number"):
        make_row(**BASE, nothing=1, p50_s="x")


def test_times_are_utc_and_naive_ones_are_refused():
    noon = dt.datetime(2025, 5, 1, 12)
    with pytest.raises(RowError, match="created_at: expected a datetime with a time zone"):
        make_row(**BASE, created_at=noon)
    tokyo = noon.replace(tzinfo=dt.timezone(dt.timedelta(hours=9)))
    row = make_row(**BASE, created_at=tokyo)
    stored = pa.Table.from_pylist([row], schema=SCHEMA)["created_at"][0].as_py()
    assert stored == dt.datetime(2025, 5, 1, 3, tzinfo=dt.UTC)


def test_every_reason_has_a_status():
    assert {status_of(reason) for reason in REASONS} == {"ok", "failed", "unverified", "not_run"}
    assert status_of("lost_node") == "not_run" and status_of("wrong_value") == "failed"


def test_a_spec_may_come_as_json():
    assert make_row(**{**BASE, "spec": SPEC.to_json()})["spec_hash"] == SPEC.hash


def test_row_identity_is_attempt_number_and_run():
    row = seal_row(make_row(**BASE), run_id="r1", writer_id="w1", sequence=7)
    assert row["row_id"] == row_id("a" * 64, 1, "r1") and row["sequence"] == 7 and row["schema_version"] == SCHEMA_VERSION
    assert len({row_id("a" * 64, 1, "r1"), row_id("a" * 64, 2, "r1"), row_id("a" * 64, 1, "r2"), row_id("b" * 64, 1, "r1")}) == 4


def test_attempt_keys_follow_content():
    known = {"spec_hash": SPEC.hash, "target": "cpu", "translator_version": "1", "harness_version": "1", "program_hash": HASH}
    key = attempt_key(**known)
    assert key == attempt_key(**known)
    changes = (
        {"target": "sm_75"},
        {"translator_version": "2"},
        {"program_hash": "1" * 64},
        {"device_key": HASH},
        {"tuning": {"BM": 64}},
    )
    assert len({key, *(attempt_key(**{**known, **change}) for change in changes)}) == 6
    with pytest.raises(ValueError, match="exactly one|either program_hash"):
        attempt_key(**known, author="rules")


def test_buckets_round_up_to_powers_of_two():
    assert [power_bucket(n) for n in (0, 1, 2, 3, 4, 5, 1024, 1025)] == [0, 1, 2, 4, 4, 8, 1024, 2048]
    bucket = ShapeBucket.of(3, 1000, 1025)
    assert str(bucket) == "b4_q1024_k2048" and ShapeBucket.parse(str(bucket)) == bucket
    assert (4, 513, 1025) in bucket and (4, 512, 1025) not in bucket
    with pytest.raises(ValueError, match="powers of two"):
        ShapeBucket.parse("b3_q1_k1")
    with pytest.raises(ValueError, match="expected the form"):
        ShapeBucket.parse("q1")


def test_importing_the_schema_brings_no_torch_and_no_ray():
    code = "import sys, catalog, catalog.schema; assert not {'torch', 'ray', 'openai', 'typer'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
