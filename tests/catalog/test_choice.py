"""Choosing by intervals, resuming by content, locks, differences, SQL."""

import json
import sys

import pytest
from catalog_rows import DEVICE, SPEC, attempt, sha, verified

import catalog
from catalog import difference, lockfile, query
from catalog.choice import choose, choose_each
from catalog.compaction import compact
from catalog.errors import CatalogError, QueryError
from catalog.keys import ShapeBucket


def stored(cat, *rows, run="r1"):
    with cat.writer(run) as writer:
        return writer.append_all(rows)


def rows(cat):
    return cat.rows().to_pylist()


def test_the_fastest_wins_when_intervals_are_apart(cat):
    slow, fast = stored(cat, verified(1, 1.2e-3), verified(2, 1.0e-3))
    choice = choose(rows(cat))
    assert (choice.row["row_id"], choice.ties, choice.why) == (fast, (), "the fastest")
    assert choose(rows(cat), incumbent=slow).row["row_id"] == fast  # an incumbent wins ties, not races


def test_ties_go_to_the_incumbent_then_the_earliest_run_then_the_content(cat):
    first = stored(cat, verified(1, 1.01e-3), verified(2, 1.011e-3), run="r1")
    later = stored(cat, verified(3, 1.0e-3), run="r2")
    choice = choose(rows(cat))
    by_content = min((r for r in rows(cat) if r["run_id"] == "r1"), key=lambda r: r["program_hash"])
    assert choice.row["row_id"] == by_content["row_id"] and "earliest run among 3" in choice.why
    assert {r["row_id"] for r in choice.ties} == {*first, *later} - {choice.row["row_id"]}
    assert choose(rows(cat), incumbent=later[0]).why == "the incumbent of 3 that tie"


def test_the_same_sweep_twice_gives_the_same_choice(tmp_path):
    """Two sweeps of one plan: noise of half a percent, rows in another order."""
    chosen = []
    for number, noise in enumerate((1.0, 1.005)):
        cat = catalog.open(tmp_path / f"c{number}", create=True)
        sweep = [verified(i, 1e-3 * (1 + 0.002 * i) * (noise if i % 2 else 1)) for i in range(4)]
        stored(cat, *(sweep if number else sweep[::-1]), run=f"r{number}")
        chosen.append(choose(rows(cat)).row["program_hash"])
    assert chosen[0] == chosen[1]


def test_wide_intervals_do_not_make_a_slow_row_a_tie(cat):
    stored(cat, verified(1, 1.0e-3), verified(2, 1.2e-3, ci_low_s=0.9e-3, ci_high_s=1.5e-3))
    assert choose(rows(cat)).ties == ()


@pytest.mark.parametrize(
    "columns",
    [{"throttle_flags": ["sw_power_cap"]}, {"plausible": False}, {"p50_s": None}, {"p50_s": float("nan")}],
)
def test_rows_that_cannot_win(cat, columns):
    (good,) = stored(cat, verified(1, 2e-3))
    stored(cat, {**verified(2, 1e-3), **columns})
    assert choose(rows(cat)).row["row_id"] == good
    assert cat.best(SPEC)["row_id"] == good


def test_revoked_rows_do_not_win(cat):
    good, bad = stored(cat, verified(1, 2e-3), verified(2, 1e-3))
    cat.revoke("wrong", row_id=bad)
    assert cat.best(SPEC)["row_id"] == good
    cat.revoke("wrong too", row_id=good)
    assert cat.best(SPEC) is None


def test_devices_never_meet(cat):
    other = sha("another device")
    here, there = stored(cat, verified(1, 2e-3), verified(2, 1e-3, device_key=other))
    with pytest.raises(QueryError, match="several devices"):
        choose(rows(cat))
    with pytest.raises(QueryError, match=f"device_key: 2 devices .* one of .*{DEVICE[:12]}"):
        cat.best(SPEC)
    assert cat.best(SPEC, device_key=DEVICE)["row_id"] == here
    assert {c.row["row_id"] for c in choose_each(cat.rows()).values()} == {here, there}
    assert cat.best(SPEC, device_key=sha("a third")) is None


def test_best_by_spec_family_and_bucket(cat):
    larger = SPEC.with_shape(seqlen_q=500, seqlen_k=500, num_heads=16)
    (exact,) = stored(cat, verified(1))
    (other,) = stored(cat, verified(2, spec=larger), run="r2")
    assert cat.best(SPEC)["row_id"] == exact and cat.best(SPEC.hash)["row_id"] == exact
    assert cat.best(SPEC.with_shape(seqlen_q=300, seqlen_k=300))["row_id"] == other  # the largest problem of the bucket
    assert cat.best(SPEC.family_hash)["row_id"] == other
    assert cat.best(SPEC.with_shape(seqlen_q=100)) is None


@pytest.mark.parametrize("compacted", [False, True])
def test_resuming_goes_by_content_and_caches_failures(cat, compacted):
    stored(cat, verified(1), attempt(2, "wrong_value"), attempt(3, "lost_node"), attempt(4, "lost_node", attempt_no=3))
    if compacted:
        compact(cat)
    known = cat.resume()
    keys = [sha(f"attempt {i}") for i in range(6)]
    assert set(known.finished(keys)) == {keys[1], keys[2], keys[4]} and len(known) == 4
    assert known.get(keys[3]) == query.Ended(1, "lost_node") and known.get(keys[5]) is None
    assert set(known.finished(keys, max_attempts=1)) == {keys[1], keys[2], keys[3], keys[4]}
    assert known.get(keys[1]).is_final and not known.get(keys[3]).is_final


def test_keys_that_share_their_first_half_are_told_apart(cat):
    twins = ["ab" * 8 + f"{i:048x}" for i in (1, 2 << 130, 3 << 140)]
    with cat.writer("r1") as writer:
        writer.append_all([attempt(0, attempt_key=key) for key in twins[:2]])
    assert set(cat.resume().finished(twins)) == set(twins[:2])
    assert catalog.open(cat.uri).resume().get("0" * 64) is None


def test_a_lock_pins_choices_and_keeps_them_on_ties(cat, tmp_path):
    (first,) = stored(cat, verified(1, 1.0e-3))
    lock = lockfile.make(cat)
    lockfile.write(lock, tmp_path / "farm.lock")
    assert lockfile.read(tmp_path / "farm.lock") == lock
    pin = lock.find(DEVICE, SPEC.family_hash, ShapeBucket.of_spec(SPEC), SPEC.num_heads)
    assert (pin.row_id, pin.binary_hash, pin.spec_name) == (first, sha("binary 1"), "small")
    assert lock.find(sha("x"), SPEC.family_hash, ShapeBucket.of_spec(SPEC)) is None
    stored(cat, verified(2, 0.999e-3), run="r0")
    again = lockfile.make(cat, lock)
    assert lockfile.changes(lock, again) == [] and again.catalog_digest != lock.catalog_digest
    (better,) = stored(cat, verified(3, 0.8e-3), run="r2")
    (change,) = lockfile.changes(lock, lockfile.make(cat, lock))
    assert (change.before.row_id, change.after.row_id) == (first, better)
    digest = lockfile.catalog_digest(cat)
    compact(cat)
    assert lockfile.catalog_digest(cat) == digest
    cat.revoke("wrong", row_id=first)
    assert "revoked: wrong" in lockfile.problems(lock, cat)[0] and lockfile.catalog_digest(cat) != digest


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"farm_lock": 1, "pinned": [{}]}'])
def test_a_file_that_is_no_lock_is_refused(tmp_path, text):
    (tmp_path / "farm.lock").write_text(text)
    with pytest.raises(CatalogError, match="is no lock file; `farm catalog lock` writes one"):
        lockfile.read(tmp_path / "farm.lock")
    with pytest.raises(CatalogError, match="cannot be read"):
        lockfile.read(tmp_path / "absent.lock")


def test_a_lock_of_a_later_version_and_one_with_no_bucket(tmp_path):
    path = tmp_path / "farm.lock"
    path.write_text('{"farm_lock": 2, "pins": []}')
    with pytest.raises(CatalogError, match="was written by a later version; update kernel-farm here"):
        lockfile.read(path)
    pin = dict.fromkeys(lockfile.Pinned.__dataclass_fields__, "x")
    path.write_text(json.dumps({"farm_lock": 1, "catalog": "c", "catalog_digest": "d", "pinned": [pin]}))
    with pytest.raises(CatalogError, match="is no lock file"):
        lockfile.read(path)


def test_differences_of_two_catalogs(tmp_path):
    specs = [SPEC.with_shape(seqlen_q=n, seqlen_k=n) for n in (128, 256, 512, 1024)]
    a, b = (catalog.open(tmp_path / name, create=True) for name in "ab")
    stored(a, *(verified(i, 1e-3, spec=s) for i, s in enumerate(specs[:3])))
    stored(b, verified(0, 1.1e-3, spec=specs[0]), verified(1, 1.005e-3, spec=specs[1]), verified(3, 1e-3, spec=specs[3]))
    changes = {c.spec_hash: c for c in difference.compare(a, b)}
    assert [changes[s.hash].verdict for s in specs] == ["slower", "same", "removed", "added"]
    assert changes[specs[0].hash].change == pytest.approx(0.1)
    assert [changes[s.hash].regressed(0.05) for s in specs] == [True, False, True, False]
    assert not changes[specs[0].hash].regressed(0.2)
    assert [c.verdict for c in difference.compare(b, b)] == ["same"] * 3


def test_shares():
    assert difference.parse_share("5%") == 0.05 and difference.parse_share("0.1") == 0.1
    for text in ("five", "-1%", "nan", "inf"):
        with pytest.raises(CatalogError, match="--fail-over: expected a share"):
            difference.parse_share(text)


def test_sql_over_rows_and_attempts(cat):
    stored(cat, verified(1, 1e-3), attempt(2, "lost_node"), attempt(2, attempt_no=2))
    found = cat.sql("select reason_code, count(*) as n from rows group by all order by 1").to_pylist()
    assert found == [{"reason_code": "ok", "n": 1}, {"reason_code": "wrong_value", "n": 1}]
    assert cat.sql("select count(*) as n from attempts").to_pylist() == [{"n": 3}]
    assert cat.sql("select * from rows where p50_s < 2e-3").num_columns == len(catalog.store.SCHEMA)
    assert cat.sql("from rows select p50_s * 2 as twice where status = 'ok'").to_pylist() == [{"twice": 2e-3}]
    assert cat.sql("select columns('^p50.*') from rows where status = 'ok'").to_pylist() == [{"p50_s": 1e-3}]


@pytest.mark.parametrize("text", ["selec", "select nope from rows", "select * from nothing", "select * from '/etc/passwd'", ""])
def test_wrong_sql_is_one_line(cat, text):
    with pytest.raises(QueryError, match="^sql: ") as caught:
        cat.sql(text)
    assert "\n" not in str(caught.value)


def test_sql_without_duckdb_says_how_to_get_it(cat, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(CatalogError, match=r"pip install 'kernel-farm\[sql\]'"):
        cat.sql("select 1 from rows")
