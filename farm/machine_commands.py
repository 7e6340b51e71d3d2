"""`farm doctor`, `preflight`, `selftest`, `targets`, `variants`, `report`: what a machine can do, what a catalog holds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from farm.config import catalog_location
from farm.console import EXIT_FAILED, CatalogOption, InputError, JsonOption, check_writable, writing

MARKS = {"ok": "ok     ", "limited": "limited", "missing": "MISSING"}


def doctor(catalog: CatalogOption = None, as_json: JsonOption = False) -> None:
    """What this machine can build, verify and load, what is missing, and how to mend it. Exit code 1 when no sweep can run."""
    from catalog.locations import Location
    from farm.config import load_config
    from farm.doctor import examine

    where = catalog_location(catalog)
    Location.of(where)  # a slip of the pen is bad input, and no finding
    found = examine(load_config(), where)
    if as_json:
        typer.echo(json.dumps(found.plain()))
    else:
        for finding in found.findings:
            typer.echo(f"{MARKS[finding.state]}  {finding.name}: {finding.detail}")
            if finding.cure and finding.state != "ok":
                typer.echo(f"         mend it with: {finding.cure}")
        for what, targets in (("build for", found.can_build), ("verify", found.can_verify), ("load", found.can_load)):
            typer.echo(f"This machine can {what}: {', '.join(targets) or 'nothing'}")
    if not found.well:
        raise typer.Exit(EXIT_FAILED)


def preflight(
    plan: Annotated[
        Path | None, typer.Argument(help="The plan to be run. Left out: the small default plan.", show_default=False)
    ] = None,
    address: Annotated[str, typer.Option(help="The cluster: auto or ray://HOST:PORT.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """What every node of a cluster has, and what a plan asks for that none can meet: then the exit code is 1."""
    from farm.plan_file import load_plan
    from farm.preflight import preflight as look
    from farm.rules import resolved_targets
    from farm.session import join_cluster, stop_session

    targets = resolved_targets(load_plan(plan).targets)
    if address == "local":
        raise InputError("--address", "expected auto or ray://HOST:PORT; `farm doctor` looks at this machine")
    join_cluster(address)
    try:
        found = look(targets)
    finally:
        stop_session()
    if as_json:
        typer.echo(json.dumps(found.plain()))
    else:
        for line in found.lines():
            typer.echo(line)
    if not found.ready:
        raise typer.Exit(EXIT_FAILED)


def selftest(
    quick: Annotated[bool, typer.Option(help="A third of the traps, and no timing: what a sweep asks of a machine.")] = False,
    device: Annotated[str, typer.Option(help="cpu, or a GPU: cuda:0.")] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Traps have to be refused, each for its reason, and a known good kernel accepted. Exit code 1 when one is not."""
    from farm.config import load_config
    from verifier.environment import NoDevice, device_key
    from verifier.selftest import passed
    from verifier.selftest import selftest as run_selftest
    from verifier.selftest_check import Check

    def show(check: Check) -> None:
        if not as_json:
            word = "ok    " if check.ok else "FAILED"
            found = check.found if check.ok else f"expected {check.expected}, found {check.found}"
            typer.echo(f"{word}  {check.name}: {found} ({check.seconds:.1f} s)")

    try:
        device_key(device)  # before anything is printed
        checks = run_selftest(load_config().cache, quick=quick, progress=show, device=device)
    except NoDevice as error:
        raise InputError("--device", str(error).removeprefix("device: ")) from None
    if as_json:
        typer.echo(json.dumps({"passed": passed(checks), "checks": [dataclasses.asdict(c) for c in checks]}))
    else:
        typer.echo(f"{sum(c.ok for c in checks)} of {len(checks)} checks passed")
    if not passed(checks):
        raise typer.Exit(EXIT_FAILED)


def status(as_json: JsonOption = False) -> None:
    """The sweeps that run on this machine now: attempts by reason, queues, devices in and out of service, rate, time left."""
    from farm.config import load_config
    from farm.status import running_sweeps, status_lines

    found = running_sweeps(load_config().cache)
    if as_json:
        typer.echo(json.dumps(found))
        return
    for line in (line for said in found for line in status_lines(said)):
        typer.echo(line)
    if not found:
        typer.echo("no sweep is running here")


def targets(as_json: JsonOption = False) -> None:
    """What can be built for, with the facts that translators know, and which of it runs here."""
    from farm.rules import CPU_FORMS, forms_here
    from generator.canonical import to_plain
    from generator.targets import TARGETS

    here = forms_here()
    listed = CPU_FORMS | {name: t for name, t in TARGETS.items() if t.family != "cpu"}
    if as_json:
        typer.echo(json.dumps([to_plain(t) | {"plan_name": name, "runs_here": name in here} for name, t in listed.items()]))
        return
    for name, t in listed.items():
        note = " (runs here; `cpu` means this one)" if here[:1] == (name,) else " (runs here)" if name in here else ""
        typer.echo(f"{name}: {', '.join(t.hardware)}{note}")
        limits = f"; {t.shared_bytes >> 10} KiB shared memory a block, {t.registers} registers a thread" if t.shared_bytes else ""
        typer.echo(f"    {', '.join(t.instructions)}; matrices of {', '.join(t.dtypes)}{limits}")


def report(
    location: CatalogOption = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the page goes.")] = Path("report.html"),
) -> None:
    """A catalog as one HTML page with plots: what was tried, what won, by how much."""
    from catalog import store
    from farm.report import make_report

    held = store.open(catalog_location(location))
    check_writable("--output", output)
    page = make_report(held)
    with writing("--output", output) as fresh:
        fresh.write_text(page)
    typer.echo(f"{output}: {len(page)} bytes")


def variants(
    file: Annotated[Path | None, typer.Argument(help="A Python file with rules of your own, to be shown too.")] = None,
    as_json: JsonOption = False,
) -> None:
    """The mask and score rules that a plan may name, with their parameters."""
    from farm.variants import load_variants
    from generator.masks import MASKS
    from generator.scores import SCORES

    if file is not None:
        load_variants(file)
    rules = [("mask", r.name, r.description, r.parameters) for r in MASKS.values()]
    rules += [("score", r.name, r.description, r.parameters) for r in SCORES.values()]
    if as_json:
        plain = [
            {
                "kind": k,
                "name": n,
                "description": d,
                "parameters": {p.name: {"allowed": p.allowed, "default": p.default} for p in ps},
            }
            for k, n, d, ps in rules
        ]
        typer.echo(json.dumps(plain))
        return
    for kind, name, description, parameters in rules:
        typer.echo(f"{kind} {name}: {description}")
        for p in parameters:
            default = "must be given" if p.default is None else f"default {p.default}"
            typer.echo(f"    {p.name}: {p.allowed}; {p.meaning} ({default})")
