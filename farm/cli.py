"""The command line: reads flags, calls the parts, prints. Holds no logic of its own.

Exit codes: 0 success, 1 the work was done and something failed, 2 bad input (one line says what), 3 a sweep was broken off by
what is around it (Ray's head lost, no room for rows, a later start; the same command goes on), 130 stopped by a signal.
Heavy imports happen inside the commands, so that `farm --help` is quick.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farm.ablate_command import ablate
from farm.catalog_commands import catalog_app
from farm.console import (
    EXIT_BROKEN_OFF,
    EXIT_FAILED,
    EXIT_STOPPED,
    App,
    CatalogOption,
    InputError,
    JsonOption,
    guard,
    leave,
    print_lines,
)
from farm.machine_commands import doctor, preflight, report, selftest, status, targets, variants
from farm.row_commands import explain, logs, reproduce
from farm.tl_commands import tl_app

if TYPE_CHECKING:
    from farm.plan import Plan
    from farm.summary import Summary

app = App(
    name="farm",
    help="Writes attention kernels, judges them, keeps them in a catalog that torch programs load.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(tl_app, name="tl")
app.add_typer(catalog_app, name="catalog")
app.command(epilog="Example: farm doctor --catalog ./farm-catalog")(doctor)
app.command(epilog="Example: farm preflight my_model.yaml --address auto")(preflight)
app.command(epilog="Example: farm report --catalog ./farm-catalog -o report.html")(report)
app.command(epilog="Example: farm explain 1x32/8x777 --dim 128 --dtype fp32 --causal")(explain)
app.command(epilog="Example: farm reproduce 3fa94c --catalog ./farm-catalog")(reproduce)
app.command(epilog="Example: farm logs 3fa94c --catalog ./farm-catalog")(logs)
app.command(epilog="Example: farm status --json")(status)
app.command(epilog="Example: farm selftest --quick")(selftest)
app.command(epilog="Example: farm ablate my_model.yaml --model NAME --samples 10 --k 5")(ablate)
app.command(epilog="Example: farm targets --json")(targets)
app.command(epilog="Example: farm variants examples/variants/dilated.py")(variants)

PlanArgument = Annotated[Path | None, typer.Argument(help="A plan (YAML). Left out: the small default plan.", show_default=False)]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"kernel-farm {version('kernel-farm')}")
        except PackageNotFoundError:
            typer.echo(f"kernel-farm, not installed, from {Path(__file__).parents[1]}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Options before the command's name."""


@app.command(epilog="Example: farm sweep examples/plans/llama3_8b.yaml --catalog ./farm-catalog --budget minutes=10")
def sweep(
    plan: PlanArgument = None,
    catalog: CatalogOption = None,
    targets: Annotated[str | None, typer.Option(help="Comma-separated targets instead of the plan's: cpu,sm_90a.")] = None,
    author: Annotated[str | None, typer.Option(help="rules, llm or llm-direct, instead of the plan's.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name, for --author llm and llm-direct.")] = None,
    base_url: Annotated[str | None, typer.Option(help="An OpenAI-compatible endpoint. Default: OPENAI_BASE_URL.")] = None,
    style: Annotated[
        str | None, typer.Option(help="two_stage (a sketch first) or one_pass, for --author llm. Default: two_stage.")
    ] = None,
    translator: Annotated[
        str | None, typer.Option(help="ours, or llm: the model writes the C++ or CUDA for its TL too. Default: ours.")
    ] = None,
    replay: Annotated[bool, typer.Option("--replay", help="Ask no model: use the answers on record in the catalog.")] = False,
    budget: Annotated[
        str | None, typer.Option(help="When to stop: minutes=10,attempts=200,usd=5,tokens=1000000,gpu_s=600.")
    ] = None,
    budget_usd: Annotated[float | None, typer.Option(min=0, help="Stop asking a model at this cost.")] = None,
    budget_tokens: Annotated[int | None, typer.Option(min=0, help="Stop asking a model at so many tokens.")] = None,
    budget_gpu_s: Annotated[float | None, typer.Option(min=0, help="Stop after so many seconds on the device.")] = None,
    address: Annotated[str, typer.Option(help="Ray: local, auto or ray://HOST:PORT.")] = "local",
    executor: Annotated[str, typer.Option(help="ray, or local: one job at a time in this process.")] = "ray",
    tune: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Candidates of the search for each problem, instead of the plan's.")
    ] = None,
    sanitize: Annotated[bool, typer.Option("--sanitize", help="Run CUDA kernels under compute-sanitizer too.")] = False,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="On a cluster: build for targets that no node judges, as rows that say so.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be solved.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: JsonOption = False,
    stages: Annotated[str, typer.Option(hidden=True)] = "farm.stages",
) -> None:
    """Write, judge and time kernels for every problem of a plan; each attempt becomes a row of the catalog."""
    from farm.flags import changed_plan
    from farm.plan_file import load_plan

    budgets = {"usd": budget_usd, "tokens": budget_tokens, "gpu_s": budget_gpu_s}
    for name, value in budgets.items():
        if value is not None and not math.isfinite(value):
            flag = f"--budget-{name.replace('_', '-')}"
            raise InputError(flag, f"expected a finite number of at least 0, found {value}")
    chosen = changed_plan(
        load_plan(plan),
        targets=targets,
        author=author,
        tune=tune,
        budget=",".join(filter(None, [budget, *(f"{name}={value}" for name, value in budgets.items() if value is not None)]))
        or None,
        model=_given(model=model, base_url=base_url, style=style, translator=translator, replay=replay or None),
    )
    if executor not in ("ray", "local"):
        raise InputError("--executor", f"expected ray or local, found {executor!r}")
    if dry_run:
        if chosen.author != "rules":
            from farm.authors import model_settings

            model_settings(chosen)  # wrong flags are as wrong here
        _print_problems(chosen, as_json)
        return
    from farm.config import load_config
    from farm.executors import check_stages
    from farm.on_ray import Options
    from farm.sweep import run_sweep

    check_stages(stages)
    config = load_config()
    where = chosen.catalog or config.catalog if catalog is None else catalog
    options = Options(where, executor, address, quiet, stages, allow_missing, sanitize)
    _conclude(run_sweep(chosen, options, config), as_json)


def _conclude(summary: Summary, as_json: bool) -> None:
    """What came of a sweep, printed, and as this process's exit code."""
    from farm.tables import print_summary

    if as_json:
        typer.echo(json.dumps(summary.plain()))
    else:
        print_summary(summary)
    if summary.stopped_by_signal:
        raise typer.Exit(EXIT_STOPPED)
    if summary.broken_off:
        raise typer.Exit(EXIT_BROKEN_OFF)
    if not summary.any_verified:
        raise typer.Exit(EXIT_FAILED)


def _given(**flags: object) -> dict[str, object]:
    """The flags that were given."""
    return {name: value for name, value in flags.items() if value is not None}


def _print_problems(plan: Plan, as_json: bool) -> None:
    """What a sweep would solve."""
    if as_json:
        typer.echo(json.dumps([{"model": s.name, "spec": str(s), "target": t, "hash": s.hash} for s, t in plan.problems()]))
    else:
        print_lines(f"{spec.name}: {spec} on {target}" for spec, target in plan.problems())


def main() -> None:
    """The entry point of the `farm` script."""
    if os.environ.get("FARM_DEBUG"):
        app()
    leave(guard(app))
