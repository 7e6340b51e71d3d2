"""The one-way rule between the packages, in fresh interpreters and in the text of every import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "generator": ("verifier", "catalog", "farm", "ray", "typer", "torch"),
    "verifier": ("catalog", "farm", "ray", "openai", "typer", "generator.authors"),
    "catalog": ("farm", "ray", "openai", "typer", "generator.authors"),
    "farm": (),
}


def modules(package: str) -> list[str]:
    files = sorted((ROOT / package).rglob("*.py"))
    names = (".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for f in files)
    return [n for n in names if not n.endswith("__main__")]


def imported(file: Path) -> set[str]:
    """Every module that a file's imports name, those inside functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_file_names_a_package_above_it(package: str) -> None:
    for file in (ROOT / package).rglob("*.py"):
        for name in imported(file):
            assert not any(name == f or name.startswith(f + ".") for f in FORBIDDEN[package]), f"{file} imports {name}"


@pytest.mark.parametrize("package", FORBIDDEN)
def test_every_module_imports_alone_and_brings_nothing_from_above(package: str) -> None:
    code = f"""
import importlib, sys
for name in {modules(package)!r}:
    importlib.import_module(name)
print(",".join(n for n in {FORBIDDEN[package]!r} if n in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
