"""Tables: whole on a wide terminal, a line a cell on a narrow one."""

from __future__ import annotations

import io
import sys

import pytest

from farm.tables import print_table

TITLES, ROWS = ("model", "target", "ours, ms"), (("Llama-3-8B", "cpu-avx512", "3.170"), ("BERT-base", "cpu-avx512", "12.5"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, out: io.StringIO, columns: int) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", out)
    print_table(TITLES, ROWS)
    return out.getvalue().splitlines()


def test_a_pipe_gets_plain_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, io.StringIO(), 10)
    assert lines == ["model       target      ours, ms", "Llama-3-8B  cpu-avx512     3.170", "BERT-base   cpu-avx512      12.5"]


def test_a_terminal_gets_a_table_and_a_narrow_one_a_line_for_each_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("Llama-3-8B" in line and "3.170" in line for line in shown(monkeypatch, Terminal(), 80))
    close = shown(monkeypatch, Terminal(), 30)
    assert close[-2:] == ["Llama-3-8B cpu-avx512 3.170", "BERT-base  cpu-avx512  12.5"], "no room for lines, but for words"
    narrow = shown(monkeypatch, Terminal(), 20)
    assert narrow[:4] == ["model: Llama-3-8B", "target: cpu-avx512", "ours, ms: 3.170", ""] and len(narrow) == 8
