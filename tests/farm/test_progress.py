"""What a person sees of a sweep whose author is a language model: a line that is up to date, also while nothing ends."""

import io

import pytest
from rich.console import Console

from farm import progress
from farm.jobs import Job
from farm.progress import LiveDisplay, PlainDisplay, Tally
from generator.spec import AttentionSpec

LINE = "model m: 3 asked, the longest for 41 s; 7 answers, 1,200 tokens in, 400 out, 0.0131 USD"


def test_lines_tell_of_the_model_when_nothing_ends_for_a_while(monkeypatch):
    said = []
    display = PlainDisplay(Tally(author=lambda: LINE), said.append)
    display.pulse()
    assert said == []
    monkeypatch.setattr(progress, "SILENCE_S", 0.0)
    display.pulse()
    assert said == [LINE]


@pytest.mark.parametrize(("mode", "shown"), [("rules", 1.5), ("llm", 2.0)])
def test_the_closing_table_shows_the_longest_measured_of_the_rules_and_the_fastest_of_a_model(mode, shown):
    spec, tally = AttentionSpec(1, 1, 8, 8, 1, 4, 4), Tally()
    job = Job("0" * 64, spec, "cpu", "")
    for generation, ratio in ((0, 2.0), (1, 1.5)):
        row = {"reason_code": "ok", "author_mode": mode, "generation": generation, "ratio_p50": ratio}
        tally.add(job, row, known=False)
    assert tally.best[spec.hash, "cpu"].row["ratio_p50"] == shown


def test_a_note_is_told_whole_on_a_narrow_terminal():
    display = LiveDisplay(Tally(), dict)
    display._console = Console(width=20, file=io.StringIO())
    display.note("sm_80: no node of the cluster has the resource class_a100; join one")
    assert "".join(display._console.file.getvalue().split()).endswith("class_a100;joinone")


def test_rules_have_nothing_to_tell(monkeypatch):
    monkeypatch.setattr(progress, "SILENCE_S", 0.0)
    said = []
    PlainDisplay(Tally(), said.append).pulse()
    assert said == []


def test_the_live_display_and_the_status_hold_the_ledger():
    tally = Tally(author=lambda: LINE)
    console = Console(width=200)
    with console.capture() as shown:
        console.print(LiveDisplay(tally, dict)._render())
    assert LINE in shown.get() and tally.plain()["author"] == LINE
