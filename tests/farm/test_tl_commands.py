"""`farm tl`: check, fmt, run and translate on files of the tutorial, and on rubbish."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from farm.tl_commands import tl_app
from generator.tl.diagnostics import TLError

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
def test_rubbish_is_refused_in_a_moment(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "rubbish.tl"
    file.write_bytes(make())
    started = time.process_time()
    done = tl("check", file)
    assert done.exit_code == 2 and done.output.strip()
    assert time.process_time() - started < 4


GEMM, CAUSAL = str(EXAMPLES / "gemm.tl"), str(EXAMPLES / "causal.tl")
SIZES = ("--set", "M=3", "--set", "N=5", "--set", "K=4")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("check", "no.tl"), "no.tl: cannot be read: no such file or directory"),
        (("check", ""), "FILE: expected a value, found an empty text"),
        (("run", GEMM, "--set", "BM"), "--set: expected NAME=NUMBER, found 'BM'"),
        (("run", GEMM, "--set", "=5"), "--set: expected NAME=NUMBER, found '=5'"),
        (("run", GEMM, "--set", "M=-1"), "sizes: expected none below 0, found"),
        (("run", GEMM, "--set", "M=2.5"), "M: expected a whole number (i32), found 2.5"),
        (("run", str(EXAMPLES / "sigmoid.tl"), "--set", "Heads=1000000000"), "grid: expected at most 1,000,000 blocks, found"),
        (("run", GEMM, "--set", "K=100000000"), "sizes: expected at most 134,217,728 elements in all, found A with"),
        (("run", CAUSAL, "--set", "SeqQ=5"), "--set: SeqQ: the header's spec and run lines decide it"),
        (("translate", CAUSAL, "--set", "SeqQ=5"), "--set: SeqQ: arguments are given to each call"),
        (("run", GEMM, "--inputs", GEMM), "--inputs: "),
        (("run", GEMM, "--inputs", "one.npy"), "--inputs: one.npy: expected arrays in NumPy's .npz form"),
        (("run", GEMM, "--inputs", "cut.npz"), "--inputs: cut.npz: expected arrays in NumPy's .npz form"),
        (("run", GEMM, "--inputs", "good.npz"), "--set: expected a value of M, N, K too: --set M=VALUE"),
        (("run", GEMM, "--output", "/dev/full"), "--output: /dev/full: cannot be written: no space left"),
        (("run", str(EXAMPLES / "sketch.tl")), f"{EXAMPLES / 'sketch.tl'}: is a sketch"),
        (("translate", str(EXAMPLES / "sketch.tl")), f"{EXAMPLES / 'sketch.tl'}: is a sketch"),
        (("translate", str(EXAMPLES / "full.tl"), "--target", "sm_75"), f"{EXAMPLES / 'full.tl'}:15: unsupported_dtype: Q: products on sm_75 take f16, found f32"),  # noqa: E501
    ],
)  # fmt: skip
def test_bad_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("one.npy", np.ones(3, np.float32))
    np.savez("good.npz", A=np.ones((3, 4), np.float32), B=np.ones((5, 4), np.float32))
    Path("cut.npz").write_bytes(Path("good.npz").read_bytes()[:200])
    before = sorted(tmp_path.iterdir())
    done = tl(*args)
    assert isinstance(done.exception, ValueError) and str(done.exception).startswith(message), done.output or done.exception
    assert sorted(tmp_path.iterdir()) == before


def test_on_a_full_disk_what_was_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").write_text("before")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.replace", full)
    for args in (("run", EXAMPLES / "gemm.tl"), ("translate", EXAMPLES / "gemm.tl")):
        done = tl(*args, "-o", tmp_path / "out")
        assert str(done.exception) == f"--output: {tmp_path / 'out'}: cannot be written: no space left on device", done.output
    assert (tmp_path / "out").read_text() == "before" and len(list(tmp_path.iterdir())) == 1


def test_an_output_may_be_a_device_or_behind_a_link_and_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "out").touch(mode=0o640)
    (tmp_path / "link").symlink_to("out")
    assert tl("translate", EXAMPLES / "gemm.tl", "-o", tmp_path / "link").exit_code == 0
    assert (tmp_path / "link").is_symlink() and "gemm" in (tmp_path / "out").read_text()
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640
    assert tl("translate", EXAMPLES / "gemm.tl", "-o", "/dev/null").exit_code == 0 and Path("/dev/null").is_char_device()


@pytest.mark.parametrize("value", ["64.0", "7", "nan", "99999999999999999999"])
def test_only_its_choices_fill_a_hole(value: str) -> None:
    done = tl("run", CAUSAL, "--set", f"BM={value}")
    assert isinstance(done.exception, TLError) and "is no choice: 64, 128" in str(done.exception)
    assert tl("run", CAUSAL, "--seed", "-1").exit_code == 2


def test_the_same_program_from_standard_input_and_behind_a_byte_order_mark(tmp_path: Path) -> None:
    data = Path(CAUSAL).read_bytes()
    assert RUNNER.invoke(tl_app, ["fmt", "-"], input=data).stdout.encode() == data
    assert "agrees with the oracle" in RUNNER.invoke(tl_app, ["run", "-"], input=data).stdout
    (tmp_path / "marked.tl").write_bytes(b"\xef\xbb\xbf" + data)
    assert "agrees with the oracle" in tl("run", tmp_path / "marked.tl").stdout


def test_given_arrays_give_the_outputs_under_the_name_that_was_asked_for(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", A=np.ones((3, 4), np.float32), B=np.full((5, 4), 2, np.float32))
    done = tl("run", GEMM, "--inputs", tmp_path / "in.npz", *SIZES, "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    with np.load(tmp_path / "out") as found:
        assert (found["C"] == 8).all() and found["C"].shape == (3, 5)


@pytest.mark.parametrize(
    ("references", "message"),
    [
        ("def gemm(:", "oracle: {}/references.py: cannot be imported: SyntaxError"),
        ("import nothing_of_that_name", "oracle: {}/references.py: cannot be imported: ModuleNotFoundError"),
        ("def gemm(tensors, scalars): raise RuntimeError('boom')", "oracle: references.py:gemm: RuntimeError: boom"),
        ("def gemm(tensors, scalars): return None", "oracle: references.py:gemm: expected arrays by name, found NoneType"),
        ("def gemm(tensors, scalars): return {'Z': 1}", "oracle: expected C with shape (130, 100), found Z"),
        ("def gemm(tensors, scalars): return {'C': [1, 2]}", "oracle: expected C with shape (130, 100), found shape (2,)"),
    ],
)
def test_an_oracle_of_ones_own_that_fails_is_one_sentence(tmp_path: Path, references: str, message: str) -> None:
    (tmp_path / "references.py").write_text(references)
    (tmp_path / "gemm.tl").write_text(Path(GEMM).read_text())
    done = tl("run", tmp_path / "gemm.tl")
    assert isinstance(done.exception, ValueError) and str(done.exception).startswith(message.format(tmp_path)), done.exception
