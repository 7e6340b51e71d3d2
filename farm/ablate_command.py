"""`farm ablate`: what each way of asking a language model comes to, on a plan's problems. Counts nothing itself."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farm.console import EXIT_FAILED, EXIT_STOPPED, CatalogOption, InputError, JsonOption

if TYPE_CHECKING:
    from farm.ablation import Way, WayTally
    from farm.plan import Plan


def ablate(
    plan: Annotated[
        Path | None, typer.Argument(help="A plan (YAML). Left out: the small default plan.", show_default=False)
    ] = None,
    catalog: CatalogOption = None,
    model: Annotated[str | None, typer.Option(help="The model's name.")] = None,
    base_url: Annotated[str | None, typer.Option(help="An OpenAI-compatible endpoint. Default: OPENAI_BASE_URL.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Independent answers to each problem in each way.")] = 5,
    k: Annotated[int | None, typer.Option("--k", min=1, help="The k of pass@k. Default: the number of samples.")] = None,
    repairs: Annotated[int, typer.Option(min=0, help="How often an answer may be mended before it counts.")] = 0,
    ways: Annotated[str | None, typer.Option(help="Some of the ways only: two-stage/ours,vanilla/model.")] = None,
    targets: Annotated[str | None, typer.Option(help="Comma-separated targets instead of the plan's.")] = None,
    replay: Annotated[bool, typer.Option("--replay", help="Ask no model: use the answers on record in the catalog.")] = False,
    budget: Annotated[str | None, typer.Option(help="When to stop: minutes=10,usd=5,tokens=1000000.")] = None,
    executor: Annotated[str, typer.Option(help="ray, or local: one job at a time in this process.")] = "ray",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: JsonOption = False,
) -> None:
    """pass@1, pass@k, faults, tokens and time of {two-stage, one-pass, vanilla} x {our translator, the model's own}."""
    from farm.ablation import WayTally, ablation_of
    from farm.config import load_config
    from farm.on_ray import Options
    from farm.sweep import run_sweep

    k = k or samples
    if k > samples:
        raise InputError("--k", f"expected at most the number of samples, {samples}, found {k}")
    if executor not in ("ray", "local"):
        raise InputError("--executor", f"expected ray or local, found {executor!r}")
    chosen = _plan(plan, targets, budget, model, base_url, replay, samples, repairs)
    tallies = tuple(WayTally(way) for way in _ways(ways))
    config = load_config()
    options = Options(chosen.catalog or config.catalog if catalog is None else catalog, executor, quiet=quiet)
    summary = run_sweep(chosen, options, config, ablation_of(tallies))
    told = _told(chosen, tallies, k, summary.stop_reason)
    if as_json:
        typer.echo(json.dumps(told))
    else:
        _print(told, tallies, k)
    if summary.stopped_by_signal:
        raise typer.Exit(EXIT_STOPPED)
    if not any(p.judged for t in tallies for p in t.problems):
        raise typer.Exit(EXIT_FAILED)


def _plan(
    path: Path | None,
    targets: str | None,
    budget: str | None,
    model: str | None,
    base_url: str | None,
    replay: bool,
    samples: int,
    repairs: int,
) -> Plan:
    from farm.flags import changed_plan
    from farm.plan_file import load_plan

    given = {"model": model, "base_url": base_url, "replay": replay or None}
    fixed = {"samples": samples, "repairs": repairs, "improvements": 0, "seed_with_rules": False, "style": "two_stage"}
    options = {name: value for name, value in given.items() if value is not None} | fixed
    return changed_plan(load_plan(path), targets=targets, author="llm", budget=budget, model=options)


def _ways(text: str | None) -> tuple[Way, ...]:
    from farm.ablation import WAYS

    known = {way.key: way for way in WAYS}
    names = [name.strip() for name in text.split(",")] if text is not None else list(known)
    for name in names:
        if name not in known:
            raise InputError("--ways", f"expected some of {', '.join(known)}, found {name!r}")
    return tuple(known[name] for name in dict.fromkeys(names))


def _told(plan: Plan, tallies: tuple[WayTally, ...], k: int, stop_reason: str) -> dict[str, Any]:
    options = dict(plan.author_options)
    return {
        "model": options["model"],
        "answers": "on record" if options.get("replay") else "asked for, or on record where the same was asked before",
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "targets": list(plan.targets),
        "problems": len(list(plan.problems())),
        "samples": options["samples"],
        "repairs": options["repairs"],
        "k": k,
        "stop_reason": stop_reason,
        "ways": [tally.plain(k) for tally in tallies],
    }


def _print(told: dict[str, Any], tallies: tuple[WayTally, ...], k: int) -> None:
    from farm.tables import print_table

    titles = [
        "way",
        "translator",
        "right",
        "pass@1",
        f"pass@{k}",
        "tokens in",
        "out",
        "model, s",
        "compile and device, s",
        "faults",
    ]
    print_table(titles, [_cells(way) for way in told["ways"]])
    asked = f"{told['problems']} problems, {told['samples']} samples each, {told['repairs']} repairs"
    print(f"\n{told['model']}, answers {told['answers']}, {told['date']}: {asked}.")
    print("These figures are of this run's answers and of nothing else.")
    for tally in tallies:
        if tally.unjudged or tally.unanswered:
            print(
                f"{tally.way.key}: {tally.unjudged} samples could not be judged here, {tally.unanswered} had no answer; left out."
            )
    if told["stop_reason"]:
        print(f"Not finished: {told['stop_reason']}.")
    if not any(way["samples_judged"] for way in told["ways"]):
        print(f"No answer was judged: nothing is said about {told['model']}.")


def _cells(way: dict[str, Any]) -> list[str]:
    def share(x: float | None) -> str:
        return "-" if x is None else f"{x:.2f}"

    faults = ", ".join(f"{count} {reason}" for reason, count in way["faults"].items()) or "-"
    right = f"{way['samples_right']}/{way['samples_judged']}"
    tokens = [f"{way[name]:,}" for name in ("tokens_in", "tokens_out")]
    seconds = [f"{way[name]:.1f}" for name in ("model_s", "work_s")]
    rates = [share(way["pass_at_1"]), share(way["pass_at_k"])]
    return [way["way"], way["translator"], right, *rates, *tokens, *seconds, faults]
