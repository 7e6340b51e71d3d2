"""Writes the tree at the end of README.md from the repository's files and their docstrings: `python tests/readme_tree.py`.

test_readme.py fails when the tree and the files disagree.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
START, END = "<!-- tree -->\n```\n", "```\n<!-- /tree -->"
#: Folders whose files are not listed one by one -> what is said of them.
FOLDERS = {
    "examples/plans/": "one plan a model, each citing the published configuration",
    "examples/tl/": "TL programs with comments: the language's tutorial",
    "generator/authors/prompts/": "what a language model is told",
    "benchmarks/results/": "what real runs measured, every run's file kept",
    "tests/": "mirror the packages",
    "verifier/traps/": "a known good kernel, and kernels that must be refused",
}
#: Files that say nothing about themselves in a form that can be read here.
SAID = {
    "README.md": "this page",
    "pyproject.toml": "packages, extras, and how the tools are set",
    "docs/architecture.md": "packages, records, and the functions between them",
}
WIDTH = 44


def files() -> list[str]:
    """Everything that git tracks or would track, tests and data left out."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return sorted(f for f in set(done.stdout.splitlines()) if (ROOT / f).exists())


def listed(names: list[str]) -> list[str]:
    """The entries of the tree: Python files and other files outside FOLDERS, and FOLDERS that hold something."""
    kept = [n for n in names if not n.startswith(tuple(FOLDERS)) and not n.startswith(".") and "/golden/" not in n]
    kept = [n for n in kept if not (n.endswith("__init__.py") and "/" in n and not sentence(ROOT / n))]
    folders = [f for f in FOLDERS if any(n.startswith(f) for n in names)]
    return sorted([*kept, *folders], key=_place)


def _place(name: str) -> tuple[bool, str, str]:
    """Folder by folder, the files of the root last."""
    folder, _, base = name.rpartition("/")
    return not folder, folder, base


def sentence(path: Path) -> str:
    """The first sentence of what a file says about itself."""
    text = path.read_text(errors="replace") if path.is_file() else ""
    if path.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    else:
        lines = [re.sub(r"^\s*(#|//|\*|<!--|/\*\*?)+\s?", "", line).strip() for line in text.splitlines()[:12]]
        said = " ".join(line for line in lines if line and not line.startswith(("!", "pragma", "[", "@")))
    first = re.split(r"(?<=[a-z`)\"'0-9])[.;](?:\s|$)", " ".join(said.split()), maxsplit=1)[0]
    first = re.split(r"(?<=[a-z]): (?=[a-z])", first, maxsplit=1)[0] if len(first) > 100 else first
    return first if len(first) <= 110 else first[:107].rsplit(" ", 1)[0] + " ..."


def tree(names: list[str]) -> str:
    """The tree as text: folders once, files below them, one comment each."""
    lines: list[str] = []
    open_folder = ""
    for name in listed(names):
        folder, _, base = name.rpartition("/")
        if base and folder and folder != open_folder:
            lines.append(_line(f"{folder}/", sentence(ROOT / folder / "__init__.py")))
        open_folder = folder
        if base != "__init__.py":
            said = FOLDERS.get(name) or SAID.get(name) or sentence(ROOT / name)
            lines.append(_line("    " + base if base and folder else name, said))
    return "\n".join(lines) + "\n"


def _line(name: str, said: str) -> str:
    return f"{name:<{WIDTH}}# {said}" if said else name


def read_tree(text: str) -> dict[str, str]:
    """Path -> comment, as the README has it."""
    if START not in text:
        return {}
    block = text[text.index(START) + len(START) : text.index(END)]
    found: dict[str, str] = {}
    folder = ""
    for line in block.splitlines():
        name, _, said = line.partition("#")
        if not line.startswith(" "):
            folder = name.strip() if name.strip().endswith("/") else ""
            found[name.strip()] = said.strip()
        else:
            found[folder + name.strip()] = said.strip()
    return found


def main() -> None:
    text = README.read_text()
    fresh = START + tree(files()) + END
    README.write_text(text[: text.index(START)] + fresh + text[text.index(END) + len(END) :])


if __name__ == "__main__":
    main()
