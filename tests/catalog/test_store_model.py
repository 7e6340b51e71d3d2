"""A catalog under random use shows what a few lines of plain Python say it should."""

import os
import random

import pytest
from catalog_rows import attempt, sha, verified

import catalog
from catalog.choice import choose, choose_each
from catalog.compaction import compact
from catalog.errors import FencedRun
from verifier.records import REASONS


class Model:
    """Every row ever stored, and which of them count."""

    def __init__(self):
        self.rows = []  # as dicts, in the order stored
        self.allowed = {}  # fenced run -> sequences by writer that still count

    def _fenced(self, row):
        limits = self.allowed.get(row["run_id"])
        return limits is not None and row["sequence"] > limits.get(row["writer_id"], -1)

    def history(self):
        return sorted((r["row_id"], r["writer_id"], r["sequence"]) for r in self.rows if not self._fenced(r))

    def current(self):
        best = {}
        for row in (r for r in self.rows if not self._fenced(r)):
            rank = (REASONS[row["reason_code"]] == "final", row["attempt_no"], row["sequence"], row["row_id"], row["writer_id"])
            if rank >= best.get(row["attempt_key"], (rank,))[0]:
                best[row["attempt_key"]] = (rank, row)
        return sorted((row["row_id"], row["writer_id"], row["sequence"]) for _, row in best.values())

    def fence(self, run):
        limits = {}
        for row in (r for r in self.rows if r["run_id"] == run and not self._fenced(r)):
            limits[row["writer_id"]] = max(row["sequence"], limits.get(row["writer_id"], 0))
        self.allowed.setdefault(run, limits)


def identities(cat, **options):
    return sorted(tuple(row.values()) for row in cat.rows(["row_id", "writer_id", "sequence"], **options).to_pylist())


class Player:
    """Does one random thing after the other to a catalog and to the model."""

    def __init__(self, folder, seed):
        self.random = random.Random(seed)
        self.cat = catalog.open(folder, create=True)
        self.model = Model()
        self.writers = []

    def step(self):
        getattr(self, self.random.choice(["append"] * 6 + ["start", "seal", "kill", "reopen", "compact", "fence"]))()

    def start(self):
        run = f"run{self.random.randrange(4)}"
        if run not in self.model.allowed:
            self.writers.append(self.cat.writer(run))

    def append(self):
        if not self.writers:
            return
        writer = self.random.choice(self.writers)
        rows = []
        for _ in range(self.random.randrange(1, 6)):
            reason = self.random.choice(["ok", "wrong_value", "lost_node"])
            make = verified if reason == "ok" else lambda key, **c: attempt(key, reason, **c)  # noqa: B023
            rows.append(make(self.random.randrange(12), attempt_no=self.random.randrange(1, 4)))
        first = writer._sequence
        try:
            ids = writer.append_all(rows)
        except FencedRun:  # sealing after the rows were stored
            return
        for i, (row, row_id) in enumerate(zip(rows, ids, strict=True)):
            stored = {**row, "row_id": row_id, "run_id": writer.run_id, "writer_id": writer.writer_id, "sequence": first + i}
            self.model.rows.append(stored)

    def seal(self):
        if self.writers:
            writer = self.random.choice(self.writers)
            if writer.run_id in self.model.allowed:
                with pytest.raises(FencedRun):
                    if not writer._journal.num_rows:
                        raise FencedRun
                    writer.seal()
            else:
                writer.seal()

    def kill(self):
        if self.writers:
            writer = self.writers.pop(self.random.randrange(len(self.writers)))
            writer._journal.close()  # the lock goes, the journal stays, as when the process dies
            writer._closed = True

    def reopen(self):
        self.cat = catalog.open(self.cat.uri, recover=self.random.random() < 0.5)

    def compact(self):
        compact(self.cat, rows_per_part=self.random.randrange(1, 12))

    def fence(self):
        if self.random.random() < 0.4:
            run = f"run{self.random.randrange(4)}"
            self.cat.fence(run)
            self.model.fence(run)


def play(folder, seed, steps):
    player = Player(folder, seed)
    for number in range(steps):
        player.step()
        where = f"seed {seed}, step {number}"
        assert identities(player.cat) == player.model.current(), where
        assert identities(player.cat, history=True) == player.model.history(), where


@pytest.mark.parametrize("seed", range(6))
def test_random_use(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    play(tmp_path / "catalog", seed, 40)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 140))
def test_long_random_use(tmp_path, seed):
    play(tmp_path / "catalog", seed, 120)


def test_choosing_in_tables_and_in_rows_is_the_same(tmp_path):
    cat = catalog.open(tmp_path / "catalog", create=True)
    noise = random.Random(7)
    for run in range(3):
        with cat.writer(f"run{run}") as writer:
            for i in range(40):
                odd = noise.choice(
                    [{}, {}, {"plausible": False}, {"throttle_flags": ["hot"]}, {"throttle_flags": []}, {"plausible": True}]
                )
                row = verified(f"{run} {i}", noise.uniform(1e-3, 1.06e-3), device_key=sha(f"d{i % 3}"), **odd)
                writer.append(row if i % 9 else {**row, "p50_s": noise.choice([None, float("nan"), float("inf"), 0.0])})
    rows = cat.rows().to_pylist()
    for (device, spec), found in choose_each(cat.rows()).items():
        group = [r for r in rows if (r["device_key"], r["spec_hash"]) == (device, spec)]
        alone = choose(group)
        assert found.row["row_id"] == alone.row["row_id"] and found.why == alone.why
    assert len(choose_each(cat.rows())) == 3
