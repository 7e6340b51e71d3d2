"""`farm tl ...`: the language by itself, on one file. Parses flags and prints; the language lives in `generator.tl`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farm.console import App, InputError, JsonOption, check_writable, writing

if TYPE_CHECKING:
    from generator.tl.ir import Program

tl_app = App(no_args_is_help=True, help="The Thinking Language by itself: check, format, run and translate a file.")

FileArgument = Annotated[str, typer.Argument(help="A TL file, or - for standard input.", show_default=False)]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE: a hole or an argument. Repeatable.")]

MAX_BYTES = 16 << 20


def read_source(name: str) -> bytes:
    """The file's bytes. Raises InputError for what cannot be read or is far too large to be a program."""
    if not name:
        raise InputError("FILE", "expected a TL file, or - for standard input, found an empty name")
    try:
        data = sys.stdin.buffer.read(MAX_BYTES + 1) if name == "-" else _read(Path(name))
    except OSError as error:
        raise InputError(name, f"cannot be read: {(error.strerror or str(error)).lower()}") from None
    if len(data) > MAX_BYTES:
        raise InputError(name, f"expected a TL file of at most {MAX_BYTES >> 20} MiB")
    return data


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def valid_program(name: str, data: bytes) -> Program:
    """The checked program of a file's bytes; prints what is wrong and exits with 2 otherwise."""
    from generator.tl.checker import parse_and_check
    from generator.tl.diagnostics import render

    parsed = parse_and_check(data)
    if parsed.program is None:
        typer.echo(render(parsed.diagnostics, data.decode(errors="replace"), name), err=True)
        raise typer.Exit(2)
    return parsed.program


@tl_app.command(epilog="Example: farm tl check examples/tl/causal.tl")
def check(
    file: FileArgument, as_json: JsonOption = False, strict: Annotated[bool, typer.Option(help="Warnings count too.")] = False
) -> None:
    """Everything that is wrong with a program, at once. Exit code 2 when there is an error."""
    from generator.tl.checker import parse_and_check
    from generator.tl.diagnostics import render, to_plain

    data = read_source(file)
    parsed = parse_and_check(data)
    program, found = parsed.program, parsed.diagnostics
    if as_json:
        typer.echo(json.dumps({"file": file, "valid": program is not None, "diagnostics": to_plain(found)}))
    elif found:
        typer.echo(render(found, data.decode(errors="replace"), file), err=True)
    else:
        assert program is not None
        typer.echo(f"{file}: {program.stage} {program.name}: no errors")
    if program is None or (strict and found):
        raise typer.Exit(2)


@tl_app.command(epilog="Example: farm tl fmt examples/tl/causal.tl --check")
def fmt(
    file: FileArgument,
    check_only: Annotated[
        bool, typer.Option("--check", help="Print nothing; exit 1 unless the file is formatted already.")
    ] = False,
) -> None:
    """The program in canonical spelling, on standard output; comments and blank lines are kept."""
    from generator.tl.formatter import format_text

    source = read_source(file)
    valid_program(file, source)
    text = format_text(source, str(file))
    if not check_only:
        sys.stdout.write(text)
    elif source != text.encode():
        raise typer.Exit(1)


@tl_app.command(epilog="Example: farm tl translate examples/tl/causal.tl --target sm_80 --set BM=128 -o causal.cu")
def translate(
    file: FileArgument,
    target: Annotated[str, typer.Option(help="A target, as `farm targets` lists them: cpu, cpu-avx512, sm_80, ...")] = "cpu",
    settings: SetOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where the source goes; standard output otherwise.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """A program as source text for a target. Holes that --set leaves open get their first choice."""
    from farm.rules import known_targets
    from generator.canonical import to_plain
    from generator.targets import find_target
    from generator.translate import translate as translate_program
    from generator.translate.records import Untranslatable
    from verifier.environment import cpu_flags

    if output is not None:
        check_writable("--output", output)
    if target not in known_targets():
        raise InputError("--target", f"expected one of {', '.join(known_targets())}, found {target!r}")
    program = valid_program(file, read_source(file))
    values = _numbers(settings or [])
    if given := [name for name in values if name in program.arguments]:
        raise InputError(
            "--set", f"{', '.join(given)}: arguments are given to each call, not to the translator; --set fills holes"
        )
    result = translate_program(filled(program, values, file), find_target(target, cpu_flags()))
    if isinstance(result, Untranslatable):
        raise InputError(f"{file}:{result.line}" if result.line else file, f"{result.reason}: {result.message}")
    if as_json:
        typer.echo(json.dumps(to_plain(result)))
    elif output is not None:
        with writing("--output", output) as fresh:
            fresh.write_text(result.source)
    else:
        sys.stdout.write(result.source)


@tl_app.command(epilog="Example: farm tl run examples/tl/causal.tl")
def run(
    file: FileArgument,
    inputs: Annotated[
        Path | None, typer.Option(help="Arrays by name (.npz) instead of random ones at the header's sizes.")
    ] = None,
    settings: SetOption = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where the outputs go (.npz).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random inputs.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Run a program in the interpreter, beside the oracle that the file names. Exit code 1 when they differ."""
    from farm.tl_run import run_file

    if output is not None:
        check_writable("--output", output)
    data = read_source(file)
    values = _numbers(settings or [])
    program = filled(valid_program(file, data), values, file)
    results = run_file(program, data.decode("utf-8-sig"), Path(file).parent, inputs, values, seed, output)
    if as_json:
        typer.echo(json.dumps(results))
    else:
        for result in results:
            typer.echo(result["line"])
    if any(result.get("agrees") is False for result in results):
        raise typer.Exit(1)


def filled(program: Program, settings: Mapping[str, int | float], file: str) -> Program:
    """The program with its holes filled: from `settings` where it names them, else by the first choice."""
    from generator.tl.fill import fill

    if program.stage == "sketch":
        raise InputError(
            file, "is a sketch, which has no sizes to run or translate with; expected code, such as examples/tl/causal.tl"
        )
    values = {name: constant.choices[0] for name, constant in program.holes.items()}
    return fill(program, values | {n: v for n, v in settings.items() if n not in program.arguments})  # type: ignore[arg-type]


def _numbers(settings: list[str]) -> dict[str, int | float]:
    found: dict[str, int | float] = {}
    for setting in settings:
        name, _, text = (part.strip() for part in setting.partition("="))
        try:
            found[name] = float(text) if any(c in text.lower() for c in ".einf") else int(text)
        except ValueError:
            name = ""
        if not name:
            raise InputError("--set", f"expected NAME=NUMBER, found {setting!r}")
    return found
