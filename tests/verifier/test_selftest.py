"""The self-test passes here, notices a broken judge, and is remembered only when it passed."""

from pathlib import Path

from verifier import selftest
from verifier.records import Failed, Passed, Witness
from verifier.traps import FOLDER, TRAPS


def test_every_trap_has_a_source_and_every_source_a_use():
    sources = {p.stem for p in Path(FOLDER).glob("*.cpp")}
    assert {t.name for t in TRAPS} | {"good", "slow_and_patched_clock"} == sources
    assert len({t.name for t in TRAPS}) == len(TRAPS)


def test_the_quick_selftest_passes_and_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(selftest, "TRAPS", tuple(t for t in TRAPS if t.name in ("zeros", "no_op", "writes_past_end")))
    seen = []
    checks = selftest.ensure_selftest(tmp_path, seen.append)
    assert selftest.passed(checks), [c for c in checks if not c.ok]
    assert tuple(seen) == checks and any("known good" in c.name for c in checks)
    assert {c.name for c in checks if c.name.startswith("fence")} == {f"fence {f.replace('_', ' ')}" for f in selftest.FENCES}
    monkeypatch.setattr(selftest, "selftest", lambda *a, **k: 1 / 0)
    assert selftest.ensure_selftest(tmp_path) == checks


def test_a_judge_that_lets_a_trap_pass_is_noticed_and_not_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(selftest, "judge", lambda *a, **k: Passed("rule", (), (), 0, 0.0))
    monkeypatch.setattr(selftest, "TRAPS", [t for t in TRAPS if t.quick][:2])
    checks = selftest.ensure_selftest(tmp_path)
    assert not selftest.passed(checks) and [c.found for c in checks if not c.ok] == ["ok", "ok"]
    assert not (tmp_path / "selftest").exists()


def test_a_refusal_for_another_reason_is_no_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(selftest, "judge", lambda *a, **k: Failed("crash", Witness("crash", "killed")))
    monkeypatch.setattr(selftest, "TRAPS", TRAPS[:1])
    checks = selftest.selftest(tmp_path, quick=True)
    assert [c.ok for c in checks if not c.name.startswith("fence")] == [True, False, False]


def test_without_a_compiler_it_says_what_to_install(tmp_path, monkeypatch):
    from verifier.compile import NoCompiler

    def none():
        raise NoCompiler("install one")

    monkeypatch.setattr(selftest, "find_compiler", none)
    checks = selftest.selftest(tmp_path)
    assert not selftest.passed(checks) and checks[0].found == "install one" and len(checks) == 1


def test_a_trap_for_a_fence_that_the_system_lacks_is_not_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(selftest, "judge", lambda *a, **k: Passed("rule", (), (), 0, 0.0, fences={"few_system_calls": False}))
    monkeypatch.setattr(selftest, "TRAPS", [t for t in TRAPS if t.name == "background_thread"])
    monkeypatch.setattr(selftest, "_clock", lambda cache_dir: selftest.Check("clock", "", "", True, 0.0))
    checks = selftest.selftest(tmp_path)
    assert selftest.passed(checks) and any("not tried" in c.found for c in checks)
    assert any(c.found.startswith("missing: a candidate may start threads") for c in checks)
