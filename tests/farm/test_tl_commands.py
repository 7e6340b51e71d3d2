"""`farm tl`: check, fmt, run and translate on files of the tutorial, and on rubbish."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farm.console import InputError
from farm.tl_commands import tl_app

EXAMPLES = Path(__file__).parents[2] / "examples/tl"
RUNNER = CliRunner()


def tl(*args: str):  # type: ignore[no-untyped-def]
    return RUNNER.invoke(tl_app, [str(a) for a in args])


def test_check_of_a_good_file() -> None:
    done = tl("check", EXAMPLES / "causal.tl", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout) == {
        "file": str(EXAMPLES / "causal.tl"),
        "valid": True,
        "diagnostics": [],
    }


def test_check_shows_every_error_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "wrong.tl"
    file.write_text((EXAMPLES / "gemm.tl").read_text().replace("Compute GEMM A, B^T", "Compute GEMM A, Bee^T"))
    done = tl("check", file)
    assert done.exit_code == 2 and "wrong.tl:" in done.output and "Bee" in done.output
    found = json.loads(tl("check", file, "--json").stdout)["diagnostics"]
    assert any(d["severity"] == "error" and d["line"] for d in found)


def test_fmt_gives_the_canonical_form_and_check_knows_it(tmp_path: Path) -> None:
    done = tl("fmt", EXAMPLES / "gemm.tl")
    assert done.exit_code == 0 and "\nKernel gemm\n" in done.stdout
    assert done.stdout.startswith("# Not attention")  # comments are kept
    file = tmp_path / "gemm.tl"
    file.write_text(done.stdout)
    assert tl("fmt", file, "--check").exit_code == 0
    file.write_text(done.stdout.replace("Kernel gemm", "Kernel   gemm"))
    assert tl("fmt", file, "--check").exit_code == 1


def test_run_holds_a_program_against_the_oracle_of_its_header(tmp_path: Path) -> None:
    done = tl("run", EXAMPLES / "gemm.tl", "--json")
    results = json.loads(done.stdout)
    assert done.exit_code == 0 and len(results) == 2 and all(r["agrees"] for r in results)
    (tmp_path / "references.py").write_text((EXAMPLES / "references.py").read_text().replace('["B"].T', '["B"].T * 1.1'))
    (tmp_path / "gemm.tl").write_text((EXAMPLES / "gemm.tl").read_text())
    done = tl("run", tmp_path / "gemm.tl")
    assert done.exit_code == 1 and "DIFFERS" in done.output


@pytest.mark.parametrize("make", [lambda: os.urandom(300_000), lambda: b"x" * 10_000_000, lambda: b"Compute S = (\n" * 1000])
def test_rubbish_is_refused_in_under_two_seconds(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "rubbish.tl"
    file.write_bytes(make())
    started = time.monotonic()
    done = tl("check", file)
    assert done.exit_code == 2 and done.output.strip()
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("check", "no.tl"), "no.tl: cannot be read: no such file or directory"),
        (("run", str(EXAMPLES / "gemm.tl"), "--set", "BM"), "--set: expected NAME=NUMBER, found 'BM'"),
        (("run", str(EXAMPLES / "gemm.tl"), "--inputs", str(EXAMPLES / "gemm.tl")), "--inputs: "),
    ],
)
def test_bad_arguments(args: tuple[str, ...], message: str) -> None:
    done = tl(*args)
    assert isinstance(done.exception, InputError) and str(done.exception).startswith(message)
