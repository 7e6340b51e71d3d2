"""The command line: help with an example everywhere, one line and exit code 2 for bad input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from farm_here import farm_here
from typer.testing import CliRunner

from farm import console
from farm.cli import app
from farm.config import VARIABLES

ROOT = Path(__file__).parents[2]
DIRECT = ("--author", "llm-direct", "--model", "m")
CAUSAL = str(ROOT / "examples/tl/causal.tl")


def farm(*args: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    return farm_here(*args, cwd=cwd, **{"RAY_ADDRESS": ""} | variables)


def farm_apart(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """As a process."""
    command = [sys.executable, "-m", "farm", *args]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, env=environment)


def commands() -> list[tuple[str, ...]]:
    def below(command: typer.core.TyperCommand, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        if hasattr(command, "commands"):
            return [p for name, c in command.commands.items() for p in below(c, (*path, name))]
        return [path]

    return below(typer.main.get_command(app), ())


def find(path: tuple[str, ...]) -> typer.core.TyperCommand:
    command = typer.main.get_command(app)
    for name in path:
        assert hasattr(command, "commands")
        command = command.commands[name]
    return command


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_every_command_has_help_with_an_example(path: tuple[str, ...]) -> None:
    command = find(path)
    assert command.help, path
    assert "farm " + " ".join(path) in (command.epilog or ""), f"{path}: give an example in the epilog"
    shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "400"})  # as a user sees it: brackets are markup to rich
    assert shown.exit_code == 0, shown.exception
    told = " ".join(re.sub("[╭╮╰╯│─]", " ", shown.output).split())
    for text in (command.help, command.epilog, *(p.help for p in command.params if not getattr(p, "hidden", False))):
        assert " ".join((text or "").split()) in told, f"{path}: {text}"


def test_plan_errors_are_lines_with_exit_code_2(tmp_path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("models: [{name: a, num_heads: 2, head_dim: 8, seqlens: [x]}]\ntargets: [gpu]")
    done = farm("sweep", str(plan))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2 and "models[0].seqlens[0]" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("sweep", "no.yaml"), "no.yaml: cannot be read"),
        (("sweep", "--tragets", "cpu"), "--tragets"),
        (("sweeep",), "sweeep"),
        (("sweep", "--catalog", ""), "--catalog: expected a value, found an empty text"),
        (("sweep", "--catalog", "foo://bar"), "catalog: cannot use 'foo://bar'"),
        (
            ("sweep", "--address", "nowhere"),
            "expected local, or a running cluster: auto, HOST:PORT or ray://HOST:PORT; 'nowhere'",
        ),
        (("sweep", "--budget", "hours=1"), "--budget: expected one of minutes, attempts, usd, tokens, gpu_s, found 'hours'"),
        (("catalog", "list", "--catalog", "none"), "catalog: there is no catalog at"),
        (("variants", "."), "cannot be read: is a directory"),
        (("selftest", "--device", "gpu"), "--device: expected cpu, a GPU such as cuda:0, or a GPU's UUID, found 'gpu'"),
        (("explain", "1x32/7x777"), "CALL: expected numbers of at least 1, heads a multiple of key heads, found '1x32/7x777'"),
        (("explain", "0x32x777"), "CALL: expected numbers of at least 1"),
        (("explain", f"99999x9999x{2**31 - 1}"), "its tensors do not fit into this machine's memory"),
        (("tl", "run", CAUSAL, "--inputs", CAUSAL), "causal.tl: expected arrays in NumPy's .npz form"),
        (("tl", "translate", CAUSAL, "--target", "cpu", "-o", "none/x.cpp"), "--output: none/x.cpp: cannot be written"),
        (("tl", "run", CAUSAL, "-o", "none/x.npz"), "--output: none/x.npz: cannot be written: no such folder; mkdir -p none"),
        (("tl", "run", CAUSAL, "-o", "."), "--output: expected the name of a file, found '.'"),
        (("tl", "run", CAUSAL, "-o", ""), "--output: expected a value, found an empty text"),
        (
            ("sweep", "--stages", "no.such"),
            "--stages: expected a module such as farm.stages, found 'no.such': No module",
        ),
        (("sweep", "--stages", ".x"), "--stages: expected a module such as farm.stages, found '.x'"),
        (("sweep", "--stages", "json"), "found 'json', which has no build, no prove, no row_without_verdict"),
        (
            ("sweep", "--dry-run", *DIRECT, "--style", "one_pass"),
            "--style: says how an author of TL goes about it; found 'one",
        ),
        (
            ("sweep", "--dry-run", *DIRECT, "--translator", "llm"),
            "--translator: says how an author of TL goes about it; found",
        ),
        (("sweep", "/dev/zero"), "/dev/zero: cannot be read: file too large"),
        (("variants", "/dev/zero"), "/dev/zero: cannot be read: file too large"),
        (("tl", "run", CAUSAL, "-o", "x" * 5000), "cannot be written: file name too long"),
        (("explain", "1x32/8x777", "--dim", "9" * 400), "--dim: expected at most 2147483647, found 9999"),
        (("explain", f"1x1x{'9' * 400}"), "CALL: expected numbers of at most 2147483647, found '1x1x9999"),
        (("explain", "1x1x8", "--window", f"{2**40},0"), "--window: expected at most 2147483647"),
        (("sweep", "--budget-usd", "inf"), "--budget-usd: expected a finite number of at least 0, found inf"),
        (("sweep", "--budget", "usd=1,usd=2"), "--budget: expected usd once, found it twice in 'usd=1,usd=2'"),
        (("sweep", "--dry-run", "--author", "llm", "--model", "m", "--base-url", "x"), "--base-url: expected a URL such as"),
        (("sweep", "--address", "ray://"), "'ray://': names no host and port, such as ray://head:10001"),
        (("sweep", "--address", "ray://no.such.host.invalid:1"), "no.such.host.invalid: no such host"),
        (("reproduce", "3fa94c", "--seconds", "-1"), "'--seconds'"),
        (("reproduce", "3fa94c", "--seconds", "nan"), "'--seconds'"),
        (("sweep", "--dry-run", "--model", "m"), "--model: says how a language model is asked"),
        (("sweep", "--dry-run", "--replay"), "--replay: says how a language model is asked"),
        (("sweep", "--dry-run", "--base-url", "x"), "--base-url: says how a language model is asked"),
        (("sweep", "--dry-run", "--author", "llm"), "--model: the llm author needs a model's name"),
        (("sweep", "--dry-run", "--author", "llm", "--model", "m", "--style", "x"), "expected one of two_stage"),
        (("explain", "1x32/8x777", "--dim", "0"), "--dim: expected HEAD_DIM or HEAD_DIM/HEAD_DIM_V, found '0'"),
    ],
)
def test_bad_arguments_are_one_line_and_leave_nothing(args: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = farm(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and message in done.stderr and not done.stdout
    assert not list(tmp_path.iterdir())


def test_what_was_given_is_told_short_and_steers_no_terminal(tmp_path: Path) -> None:
    for given, told in (
        ("\x1b[31m" + "y" * 9000 + "\u202e.yaml", r"farm: \x1b[31myyy"),
        ("a\nb.yaml", r"farm: a\nb.yaml: cannot"),
    ):
        done = farm("sweep", given, cwd=tmp_path)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and line.startswith(told) and line.isprintable() and len(line) < 600


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_nothing_may_be_given_as_an_empty_text(path: tuple[str, ...]) -> None:
    """Of every option and argument that takes a value, whatever the command: it is said before anything is done."""
    command, others = find(path), []
    for parameter in command.params:
        if getattr(parameter, "is_flag", False):
            continue
        if parameter.param_type_name == "argument":
            given, name = [*others, ""], (parameter.name or "").upper()
            others.append("x")
        else:
            name = max(parameter.opts, key=len)
            given = [name, ""]
        done = farm(*path, *given)
        assert done.returncode == 2 and done.stderr == f"farm: {name}: expected a value, found an empty text\n", (name, done)


@pytest.mark.parametrize("args", [("sweep", "no.yaml"), ("variants", "."), ("explain", "0x32x777")], ids=" ".join)
def test_a_process_says_the_same_as_a_call(args: tuple[str, ...], tmp_path: Path) -> None:
    here, apart = farm(*args, cwd=tmp_path), farm_apart(*args, cwd=tmp_path)
    assert (here.returncode, here.stdout, here.stderr) == (apart.returncode, apart.stdout, apart.stderr)


def test_an_interrupt_before_there_is_anything_to_stop_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("farm.plan_file.load_plan", interrupted)
    done = farm("sweep", "--dry-run")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "farm: stopped\n")


def test_the_version_is_told_whether_it_is_installed_or_not() -> None:
    done = farm("--version")
    assert done.returncode == 0 and done.stdout.startswith("kernel-farm"), done.stderr


def test_the_page_of_the_command_line_names_every_exit_code_and_variable() -> None:
    page = (ROOT / "docs/command_line.md").read_text()
    codes = {console.EXIT_OK, console.EXIT_FAILED, console.EXIT_INPUT, console.EXIT_BROKEN_OFF, console.EXIT_STOPPED}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == codes
    assert set(re.findall(r"`(FARM_\w+)` \|", page)) == set(VARIABLES)


def test_dry_run_lists_problems() -> None:
    done = farm("sweep", "--dry-run", "--json")
    assert done.returncode == 0 and {p["target"] for p in json.loads(done.stdout)} == {"cpu"}


def test_a_pipe_that_nobody_reads_is_no_output(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = farm("tl", "translate", CAUSAL, "-o", "pipe", cwd=tmp_path)
    assert done.returncode == 2 and "--output: pipe: cannot be written: is a pipe that nobody reads" in done.stderr


def test_a_closed_output_takes_nothing_and_breaks_nothing() -> None:
    command = f"exec {sys.executable} -m farm tl translate {CAUSAL} >&-"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    done = farm("sweep", "--executor", "local", "--catalog", str(tmp_path / "catalog"), FARM_CACHE="/proc/none")
    assert done.returncode == 2 and done.stderr.startswith("farm: FARM_CACHE: /proc/none: cannot be made"), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_a_compiler_a_sweep_says_so_once_and_starts_nothing(tmp_path: Path) -> None:
    done = farm("sweep", "--executor", "local", "--catalog", str(tmp_path / "catalog"), FARM_CXX="/no/compiler")
    assert (done.returncode, done.stdout) == (2, "") and not list(tmp_path.iterdir())
    assert done.stderr.startswith("farm: FARM_CXX: '/no/compiler' does not run here") and len(done.stderr.splitlines()) == 1


def test_the_command_alone_prints_its_help_and_nothing_else() -> None:
    done = farm()
    assert "Usage" in done.stdout + done.stderr and "farm:" not in done.stderr


def test_one_rule_for_the_catalog_that_nobody_names(tmp_path: Path) -> None:
    own = {"XDG_DATA_HOME": str(tmp_path), "FARM_CATALOG": ""}, tmp_path / "kernel-farm/catalog"
    for environ, where in (own, ({"FARM_CATALOG": "/no/such"}, "/no/such")):
        for command in (("catalog", "list"), ("explain", "1x2x3"), ("report",), ("logs", "3fa94c"), ("reproduce", "3fa94c")):
            done = farm(*command, **environ)
            assert done.returncode == 2 and f"there is no catalog at {where}" in done.stderr, (command, done.stderr)


@pytest.mark.parametrize("command", ["targets", "variants"])
def test_an_output_that_is_full_is_one_line(command: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "farm", command], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr == "farm: standard output cannot be written: no space left on device\n"


def test_a_thread_that_a_stopped_sweep_left_at_work_does_not_break_the_end() -> None:
    """What atexit knows still happens, what was printed is there, and the exit code is the one that was meant."""
    code = """if True:
        import atexit, threading, time
        from farm.console import leave
        atexit.register(lambda: print("cleaned up"))
        threading.Thread(target=time.sleep, args=(60,), name="farm-local", daemon=True).start()
        print("stopped", end=", ")
        leave(130)
    """
    path = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, env=os.environ | path)
    assert (done.returncode, done.stdout) == (130, "stopped, cleaned up\n"), done.stderr


def test_a_library_that_is_broken_does_not_break_the_end() -> None:
    """A library's thread or destructor that ends the process by a signal is never reached."""
    code = """if True:
        from farm.console import leave, library_is_broken
        import os, signal
        class Destructor:
            def __del__(self, kill=os.kill, me=os.getpid(), signal=signal.SIGKILL): kill(me, signal)
        held = Destructor()
        library_is_broken()
        leave(3)
    """
    path = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, env=os.environ | path)
    assert done.returncode == 3, done.stderr
