"""What a person sees of a sweep whose author is a language model: a line that is up to date, also while nothing ends."""

from rich.console import Console

from farm import progress
from farm.progress import LiveDisplay, PlainDisplay, Tally

LINE = "model m: 3 asked, the longest for 41 s; 7 answers, 1,200 tokens in, 400 out, 0.0131 USD"


def test_lines_tell_of_the_model_when_nothing_ends_for_a_while(monkeypatch):
    said = []
    display = PlainDisplay(Tally(author=lambda: LINE), said.append)
    display.pulse()
    assert said == []
    monkeypatch.setattr(progress, "SILENCE_S", 0.0)
    display.pulse()
    assert said == [LINE]


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
