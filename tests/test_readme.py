"""The README: its tree names the files that are there, its commands exist, its links lead somewhere."""

from __future__ import annotations

import re
import subprocess

import pytest
import typer
from readme_tree import FOLDERS, README, ROOT, files, read_tree

from farm.cli import app

TEXT = README.read_text()


@pytest.fixture(scope="module")
def names() -> list[str]:
    try:
        return files()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")


def test_every_module_stands_in_the_tree_with_a_comment(names: list[str]) -> None:
    known = read_tree(TEXT)
    modules = [n for n in names if n.endswith(".py") and not n.startswith((*FOLDERS, ".")) and not n.endswith("__init__.py")]
    missing = [n for n in (*modules, *FOLDERS) if not known.get(n) and any(f.startswith(n) for f in names)]
    assert not missing, f"run `python tests/readme_tree.py`: {missing}"


def test_the_tree_names_nothing_that_is_gone(names: list[str]) -> None:
    gone = [n for n in read_tree(TEXT) if not (ROOT / n).exists()]
    assert not gone, f"run `python tests/readme_tree.py`: {gone}"


def test_every_farm_command_that_is_shown_exists() -> None:
    command = typer.main.get_command(app)
    shown = re.findall(r"^\s*(?:\$ )?farm ((?:[a-z-]+ ?){1,2})", TEXT, re.M)
    assert len(shown) >= 5
    for words in shown:
        first, *rest = words.split()
        assert first in command.commands, f"farm {first}"
        below = command.commands[first]
        if rest and hasattr(below, "commands"):
            assert rest[0] in below.commands, f"farm {first} {rest[0]}"


def test_make_targets_that_are_shown_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|^ {4})make ([a-z]+)", TEXT, re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), f"make {target}"


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert link.startswith("https://") or (ROOT / link).exists(), link
