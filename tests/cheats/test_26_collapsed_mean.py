"""One shape near zero, and a mean of all says nothing: each shape has its own floor, and the worst stands beside the mean."""

import re
from pathlib import Path

import pytest

from catalog import difference, store
from catalog.schema import make_row
from farm.plan_file import load_plan
from farm.report import make_report
from generator.canonical import digest_text
from generator.spec import AttentionSpec
from generator.translate.records import Launch
from verifier.physics import floor_s, work_of_pairs

PLANS = sorted((Path(__file__).parents[2] / "examples/plans").glob("*.yaml"))
SPECS = [AttentionSpec(4, 2, 64, 64, 1, length, length) for length in (64, 128, 256, 512, 1024, 2048)]


@pytest.mark.parametrize("plan", PLANS, ids=lambda path: path.stem)
def test_no_shape_may_take_no_time_at_all(plan):
    """A visible key a query is the least that any of these masks leaves."""
    for spec, _ in load_plan(plan).problems():
        least = work_of_pairs(spec, spec.batch * spec.num_heads * spec.seqlen_q)
        assert floor_s(spec, least, 64) > 0, spec


def row(spec: AttentionSpec, seconds: float):
    return make_row(
        attempt_key=digest_text(spec.hash), reason_code="ok", message="", spec=spec, target="cpu", translator_version="t",
        harness_version="h", device_key=digest_text("device"), device_name="A CPU", source_hash=digest_text("s"),
        binary_hash=digest_text("b"), launch=Launch("f", (), ()), rule_id="r", verified_shapes=[(1, 64, 64)], p50_s=seconds,
        ci_low_s=0.99 * seconds, ci_high_s=1.01 * seconds, baseline_p50_s=1e-3, baseline_name="torch-sdpa",
        ratio_p50=1e-3 / seconds, ratio_low=0.9e-3 / seconds, ratio_high=1.1e-3 / seconds,
    )  # fmt: skip


def stored(folder: Path, seconds: list[float]):
    made = store.open(folder, create=True)
    with made.writer("run1") as writer:
        writer.append_all([row(spec, s) for spec, s in zip(SPECS, seconds, strict=True)])
    return made


@pytest.mark.parametrize("odd", [1e-6, 1.0], ids=["far too fast", "far too slow"])
def test_the_worst_and_the_best_stand_beside_the_mean(tmp_path, odd):
    page = make_report(stored(tmp_path / "c", [0.5e-3] * 5 + [odd]))
    told = re.search(r"geometric mean ([\d.]+)x over 6 problems, worst ([\d.]+)x, best ([\d.]+)x", page)
    assert told, page[:500]
    mean, worst, best = map(float, told.groups())
    assert worst == pytest.approx(min(2.0, 1e-3 / odd), abs=0.01) and best == pytest.approx(max(2.0, 1e-3 / odd), abs=0.01)
    assert mean > 0.3, "one shape in six cannot drag all to nothing"


def test_a_shape_that_collapsed_is_found_though_all_others_gained(tmp_path):
    before = stored(tmp_path / "before", [1e-3] * 6)
    after = stored(tmp_path / "after", [0.1e-3] * 5 + [5e-3])
    slower = [change for change in difference.compare(before, after) if change.regressed(0.05)]
    assert [change.spec_hash for change in slower] == [SPECS[-1].hash]
