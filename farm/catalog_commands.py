"""`farm catalog ...`: questions to a catalog and its upkeep. Parses flags, calls `catalog`, prints; decides nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farm.config import catalog_location
from farm.console import EXIT_FAILED, App, CatalogOption, InputError, JsonOption, check_writable

if TYPE_CHECKING:
    from catalog.store import Catalog

catalog_app = App(no_args_is_help=True, help="The catalog of kernels: look at it, choose from it, keep it in order.")

WhereOption = Annotated[
    str | None,
    typer.Option("--where", "-w", help="Condition on columns: \"status = 'ok' and p50_s < 1e-3\".", show_default=False),
]
SkipOption = Annotated[bool, typer.Option("--skip-damaged", help="Leave damaged files out, and say so, instead of stopping.")]
ColumnsOption = Annotated[str | None, typer.Option("--columns", help="Comma-separated columns.", show_default=False)]


def open_catalog(location: str | None, *, skip_damaged: bool = False) -> Catalog:
    """The catalog at a location, or at the default one. Raises LocationError where there is none; creates nothing."""
    from catalog import store

    return store.open(catalog_location(location), damaged="skip" if skip_damaged else "raise")


def columns_of(text: str | None) -> list[str] | None:
    """Each name once, in their order. Raises InputError for a list without any."""
    if text is None:
        return None
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InputError("--columns", f"expected names such as row_id,p50_s, found {text!r}")
    return names


@catalog_app.command("list", epilog="Example: farm catalog list --where \"status = 'ok' and target = 'cpu'\" --limit 20")
def list_rows(
    location: CatalogOption = None,
    where: WhereOption = None,
    columns: ColumnsOption = None,
    limit: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="At most so many, the newest first; 0 for all.")] = 50,
    every: Annotated[bool, typer.Option("--all-attempts", help="Superseded attempts too.")] = False,
    skip_damaged: SkipOption = False,
    as_json: JsonOption = False,
) -> None:
    """Rows, the newest first: one line each."""
    from farm import catalog_output as output

    held = open_catalog(location, skip_damaged=skip_damaged)
    wanted = columns_of(columns) or list(output.LISTED)
    table = held.rows(dict.fromkeys([*wanted, "sequence", "row_id"]), where, history=every)
    rows = table.sort_by([("sequence", "descending"), ("row_id", "ascending")]).slice(0, limit or None).select(wanted).to_pylist()
    output.print_rows(rows, wanted, as_json)
    output.warn_all([f"left out: {problem}" for problem in held.problems])
    if not as_json and table.num_rows > len(rows):
        output.say(f"{table.num_rows - len(rows)} more; --limit 0 shows all")


@catalog_app.command(epilog="Example: farm catalog show 3fa94c")
def show(
    row_id: Annotated[str, typer.Argument(help="A row id, or the beginning of one that is unique.", show_default=False)],
    location: CatalogOption = None,
    artifact: Annotated[
        str | None,
        typer.Option("--print", help="Print an artifact instead: sketch, tl, program, source, log, transcript, prompt."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Everything about one row: every column that has a value, warnings, and where its artifacts lie."""
    from farm import catalog_output as output

    held = open_catalog(location)
    row = held.get(row_id)
    if artifact is None:
        output.print_row(held, row, as_json)
        return
    texts = {name.removesuffix("_hash"): row[name] for name in output.artifacts_of(row) if name != "binary_hash"}
    if artifact not in texts:
        raise InputError("--print", f"expected one of {', '.join(texts) or 'none: the row has no texts'}, found {artifact!r}")
    typer.echo(held.artifacts.text(texts[artifact]), nl=False)


@catalog_app.command(epilog="Example: farm catalog best --where \"spec_name like 'Llama%'\" --device 3fa94c")
def best(
    location: CatalogOption = None,
    where: WhereOption = None,
    device: Annotated[str | None, typer.Option(help="A device key, or the beginning of one.", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """The fastest verified kernel of every device and problem. Times of one device never decide for another."""
    from catalog.query import best_of_each
    from farm import catalog_output as output

    held = open_catalog(location)
    choices = best_of_each(held, where, output.BEST)
    if device is not None:
        choices = [choice for choice in choices if choice.row["device_key"].startswith(device.lower())]
    output.print_choices(choices, as_json)


@catalog_app.command(epilog="Example: farm catalog sql \"select target, count(*) from rows where status = 'ok' group by all\"")
def sql(
    query: Annotated[str, typer.Argument(help="SQL over the tables rows and attempts.", show_default=False)],
    location: CatalogOption = None,
    as_json: JsonOption = False,
) -> None:
    """The answer to an SQL query (DuckDB's dialect) over `rows` and, with superseded ones, `attempts`."""
    from farm import catalog_output as output

    table = open_catalog(location).sql(query)
    output.print_rows(table.to_pylist(), table.column_names, as_json)


@catalog_app.command(epilog="Example: farm catalog diff ./before ./after --fail-over 5%")
def diff(
    before: Annotated[str, typer.Argument(help="A catalog.", show_default=False)],
    after: Annotated[str, typer.Argument(help="Another one.", show_default=False)],
    fail_over: Annotated[
        str | None,
        typer.Option("--fail-over", help="Exit with 1 when a best kernel got slower by more than this, or is gone: 5%."),
    ] = None,
    where: WhereOption = None,
    as_json: JsonOption = False,
) -> None:
    """The best kernel of each device and problem in two catalogs, the worst change first."""
    from catalog.difference import compare, parse_share
    from farm import catalog_output as output

    limit = parse_share(fail_over) if fail_over is not None else None
    changes = compare(open_catalog(before), open_catalog(after), where)
    output.print_changes(changes, as_json)
    regressed = [change for change in changes if limit is not None and change.regressed(limit)]
    if regressed:
        output.warn_all([f"{len(regressed)} of {len(changes)} got slower by more than {fail_over}, or are gone"])
        raise typer.Exit(EXIT_FAILED)


@catalog_app.command(epilog="Example: farm catalog verify --catalog ./farm-catalog")
def verify(
    location: CatalogOption = None,
    artifacts: Annotated[bool, typer.Option(help="Hash the artifacts too.")] = True,
    stale: Annotated[
        bool, typer.Option("--stale", help="List verified rows that another version of translator or harness made.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Judge and time those rows once more, here, and store the outcome.")
    ] = False,
    drop_damaged: Annotated[
        bool, typer.Option("--drop-damaged", help="Set damaged parts aside, so that the catalog reads again without their rows.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Reads and checks all: hashes, sums of planned and ended attempts, doubled rows. Exit code 1 when something is wrong."""
    from catalog import audit
    from catalog.compaction import drop_damaged as set_aside
    from farm import catalog_output as output

    held = open_catalog(location)
    if stale:
        output.print_rows(stale_rows(held), output.STALE, as_json)
        return
    if again:
        from farm.reproduce import again as run_again

        results = run_again(held, stale_rows(held), output.say)
        if not all(result.same_verdict for result in results):
            raise typer.Exit(EXIT_FAILED)
        return
    if drop_damaged:
        for name in set_aside(held):
            output.say(f"set aside: {name}")
    report = audit.verify(held, artifacts=artifacts)
    output.print_audit(report, as_json)
    if not report.is_clean:
        raise typer.Exit(EXIT_FAILED)


def stale_rows(held: Catalog) -> list[dict[str, Any]]:
    """Verified rows that another version of translator or harness made than this installation has."""
    from catalog import audit
    from farm.versions import harness_version, translator_version

    return audit.stale_rows(held, translator_version=translator_version(), harness_version=harness_version())


@catalog_app.command(epilog="Example: farm catalog compact --catalog s3://team/farm-catalog")
def compact(
    location: CatalogOption = None,
    rows_per_part: Annotated[int, typer.Option(min=1, max=2**31 - 1, help="At most so many rows a part.")] = 65536,
    as_json: JsonOption = False,
) -> None:
    """Makes few large parts of many small ones, for quick reads. May be stopped at any moment; changes no row."""
    from catalog.compaction import compact as run
    from farm import catalog_output as output

    done = run(open_catalog(location), rows_per_part)
    output.print_record(
        done,
        f"{done.parts_before} parts became {done.parts_after}: {done.current_rows} rows rewritten, {done.history_rows} "
        f"superseded ones moved to history, {done.fenced_rows} of superseded runs dropped",
        as_json,
    )


@catalog_app.command(epilog="Example: farm catalog merge ./from-the-lab --catalog ./farm-catalog")
def merge(
    source: Annotated[str, typer.Argument(help="The catalog to copy from.", show_default=False)],
    location: CatalogOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copies rows, artifacts, revocations and transcripts that this catalog lacks. Again, it copies nothing twice."""
    from catalog.housekeeping import merge as run
    from farm import catalog_output as output

    done = run(open_catalog(source), open_catalog(location))
    counts = f"{done.rows} rows, {done.artifacts} artifacts, {done.revocations} revocations, {done.transcripts} transcripts"
    output.print_record(done, f"copied {counts}", as_json)


@catalog_app.command(epilog="Example: farm catalog gc --dry-run")
def gc(
    location: CatalogOption = None,
    grace_hours: Annotated[float, typer.Option(min=0, help="Leave files alone that are younger than this.")] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Deletes artifacts that no row names, and what killed programs left."""
    import datetime as dt

    from catalog.housekeeping import collect_garbage
    from farm import catalog_output as output

    found = collect_garbage(open_catalog(location), dt.timedelta(hours=grace_hours), dry_run=dry_run)
    verb = "would delete" if dry_run else "deleted"
    sizes = f"{found.num_bytes / 2**20:.1f} MiB"
    output.print_record(found, f"{verb} {len(found.artifacts)} artifacts and {len(found.files)} leftover files, {sizes}", as_json)


@catalog_app.command(epilog="Example: farm catalog export best.csv --where \"status = 'ok'\" --artifacts ./kernels")
def export(
    path: Annotated[Path, typer.Argument(help="The file to write; its suffix gives the format: csv, json, jsonl, parquet.")],
    location: CatalogOption = None,
    where: WhereOption = None,
    columns: ColumnsOption = None,
    artifacts: Annotated[
        Path | None, typer.Option(help="Folder for copies of the artifacts of those rows.", show_default=False)
    ] = None,
    form: Annotated[str, typer.Option("--format", help="Instead of the suffix.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Writes rows to a file of another kind, with their artifacts if wanted."""
    from catalog.export import export as run
    from farm import catalog_output as output

    held = open_catalog(location)
    check_writable("PATH", path)
    rows, copied = run(held, path, columns=columns_of(columns), filters=where, artifacts=artifacts, form=form)
    output.print_record(
        {"path": str(path), "rows": rows, "artifacts": copied}, f"{path}: {rows} rows, {copied} artifacts", as_json
    )


@catalog_app.command(epilog="Example: farm catalog lock --output farm.lock --diff")
def lock(
    location: CatalogOption = None,
    path: Annotated[Path, typer.Option("--output", "-o", help="The lock file.")] = Path("farm.lock"),
    where: WhereOption = None,
    only_diff: Annotated[
        bool, typer.Option("--diff", help="Only say what would change; exit code 1 when something would.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Pins the best kernel of each device and problem. Choices of a lock that is there stay, unless another is clearly faster."""
    from catalog import lockfile
    from farm import catalog_output as output

    held = open_catalog(location)
    check_writable("--output", path)
    previous = lockfile.read(path) if path.exists() else None
    made = lockfile.make(held, previous, where)
    changed = lockfile.changes(previous or lockfile.Lock("", "", ()), made)
    if previous is not None:
        output.warn_all(lockfile.problems(previous, held))
    if not only_diff:
        lockfile.write(made, path)
    output.print_repinned(changed, len(made.pinned), None if only_diff else path, as_json)
    if only_diff and changed:
        raise typer.Exit(EXIT_FAILED)


@catalog_app.command(epilog='Example: farm catalog revoke 3fa94c --reason "wrong for odd lengths"')
def revoke(
    reason: Annotated[str, typer.Option(help="Why, for everybody who asks later.", show_default=False)],
    row_id: Annotated[str | None, typer.Argument(help="A row id, or its beginning.", show_default=False)] = None,
    binary: Annotated[
        str | None, typer.Option(help="Instead of a row: a binary's hash; all its rows.", show_default=False)
    ] = None,
    location: CatalogOption = None,
    as_json: JsonOption = False,
) -> None:
    """Takes a kernel out of service for good. Its rows stay, and say so."""
    from farm import catalog_output as output

    if (row_id is None) == (binary is None):
        raise InputError("revoke", "expected a row id or --binary, one of them")
    rows = open_catalog(location).revoke(reason, row_id=row_id, binary_hash=binary)
    output.print_record({"rows": rows, "reason": reason}, f"revoked {rows} rows: {reason}", as_json)


@catalog_app.command(epilog="Example: farm catalog sign --key ~/.ssh/id_ed25519 --catalog ./farm-catalog")
def sign(
    key: Annotated[Path, typer.Option("--key", "-k", help="An Ed25519 key of OpenSSH without a passphrase.", show_default=False)],
    location: CatalogOption = None,
    where: WhereOption = None,
    as_json: JsonOption = False,
) -> None:
    """Vouches for the verified kernels as they are now. Programs that trust the key serve what it signed, and nothing else."""
    from catalog import signing

    signing.needs_cryptography()
    made = signing.sign(open_catalog(location), key, where)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(made)))
        return
    typer.echo(f"{made.file}: {made.num_rows} rows, signed by {made.fingerprint[:12]}")
    typer.echo(f'Who trusts this: catalog.configure(signers=["{made.public_line}"])')
    typer.echo("    or that line in a file, and FARM_SIGNERS=FILE")
