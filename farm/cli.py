"""The command line: reads flags, calls the parts, prints. Holds no logic of its own.

Exit codes: 0 success, 1 the work was done and something failed, 2 bad input (one line says what), 130 stopped by a signal.
Heavy imports happen inside the commands, so that `farm --help` is quick.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from farm.console import InputError, guard, print_lines

app = typer.Typer(
    name="farm",
    help="Writes attention kernels, judges them, keeps them in a catalog that torch programs load.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PlanArgument = Annotated[Path | None, typer.Argument(help="A plan (YAML). Left out: the small default plan.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"kernel-farm {version('kernel-farm')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Options before the command's name."""


@app.command(epilog="Example: farm sweep examples/plans/llama3_8b.yaml --catalog ./farm-catalog")
def sweep(
    plan: PlanArgument = None,
    targets: Annotated[str | None, typer.Option(help="Comma-separated targets instead of the plan's: cpu,sm_90a.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be solved.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write, judge and time kernels for every problem of a plan; each attempt becomes a row of the catalog."""
    from farm.plan import load_plan

    chosen = load_plan(plan).with_changes(targets=tuple(targets.split(",")) if targets else None)
    if not dry_run:
        raise InputError("--dry-run", "is the only way of running so far")
    if as_json:
        typer.echo(json.dumps([{"model": s.name, "spec": str(s), "target": t, "hash": s.hash} for s, t in chosen.problems()]))
    else:
        print_lines(f"{spec.name}: {spec} on {target}" for spec, target in chosen.problems())


def _mount() -> None:
    """Groups of commands that live in files of their own."""


_mount()


def main() -> None:
    """The entry point of the `farm` script."""
    if os.environ.get("FARM_DEBUG"):
        app()
    sys.exit(guard(app))
