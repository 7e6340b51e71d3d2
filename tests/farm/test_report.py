"""The report: one page without anything outside it, that shows winners, losers and failures of a catalog."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from catalog import store
from catalog.schema import make_row
from farm.report import best_rows, geometric_mean, make_report
from generator.canonical import digest_text
from generator.spec import AttentionSpec
from generator.translate.records import Launch

SPEC = AttentionSpec(4, 2, 64, 64, 1, 100, 100, name="A <model> & co")


def row(name: str, ratio: float, generation: int = 0, reason: str = "ok", spec: AttentionSpec = SPEC) -> dict:
    served = {
        "device_key": digest_text("device"), "device_name": "A CPU", "source_hash": digest_text(name),
        "binary_hash": digest_text(name), "launch": Launch("f", (), ()), "rule_id": "r", "verified_shapes": [(1, 100, 100)],
        "p50_s": 1e-3, "baseline_p50_s": 1e-3 * ratio,
        "baseline_name": "torch-sdpa", "ratio_p50": ratio, "ratio_low": 0.95 * ratio, "ratio_high": 1.05 * ratio,
    }  # fmt: skip
    return make_row(
        attempt_key=digest_text(name), reason_code=reason, message="" if reason == "ok" else "off by 1 <here>", spec=spec,
        target="cpu", translator_version="t", harness_version="h", generation=generation, **(served if reason == "ok" else {}),
    )  # fmt: skip


class Strict(HTMLParser):
    """Tags have to close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_shows_what_happened(tmp_path: Path) -> None:
    made = store.open(tmp_path / "c", create=True)
    other = SPEC.with_shape(seqlen_q=333, seqlen_k=333)
    with made.writer("run1") as writer:
        writer.append_all([row("a", 1.5), row("b", 0.8, spec=other), row("c", 0, reason="wrong_value")])
    page = make_report(made)
    parser = Strict()
    parser.feed(page)
    assert not parser.open
    assert "1.50x" in page and "0.80x" in page and "wrong_value" in page and "<svg" in page
    assert f"geometric mean {geometric_mean([1.5, 0.8]):.2f}x" in page
    assert "A &lt;model&gt; &amp; co" in page and "off by 1 &lt;here&gt;" in page
    assert not re.search(r"https?://|<script|<link|src=", page)


def test_an_empty_catalog_has_a_page_too(tmp_path: Path) -> None:
    assert "0 attempts" in make_report(store.open(tmp_path / "c", create=True))


def test_the_longest_measurement_counts(tmp_path: Path) -> None:
    made = store.open(tmp_path / "c", create=True)
    with made.writer("run1") as writer:
        writer.append_all([row("lucky", 1.9), row("confirmed", 1.4, generation=1)])
    (best,) = best_rows(made.rows().to_pylist())
    assert best["ratio_p50"] == 1.4
