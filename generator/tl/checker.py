"""All that is wrong with a program, found at once. Changes nothing and runs nothing; `checks/` holds the rules by concern.

Names, levels, ranks and kinds are checked on the program as written; shapes, flow and ranges on its core code, for each way to
fill its holes. Line numbers are the text's in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from generator.tl.checks.bounds import Bounds
from generator.tl.checks.flow import check_flow
from generator.tl.checks.names import Scope
from generator.tl.checks.ranges import check_ranges
from generator.tl.checks.report import Report
from generator.tl.checks.statements import check_statements
from generator.tl.checks.usage import (
    Limits,
    check_limits,
    check_liveness,
    check_matrices,
    check_races,
    check_sentinels,
    check_unused_names,
    mentioned_names,
)
from generator.tl.diagnostics import Diagnostic, has_errors, in_order
from generator.tl.expand import lower, sizes, too_large
from generator.tl.fill import fill, hole_choices
from generator.tl.inference import tile_shapes, transpositions
from generator.tl.ir import (
    FUNCTIONS,
    Allocate,
    Argument,
    Copy,
    Gemm,
    Grid,
    Op,
    Program,
    Stage,
    expressions_of,
    walk,
    walk_statements,
)
from generator.tl.parser import Parsed, parse

__all__ = ["Limits", "check", "parse_and_check"]

#: So many ways to fill the holes are checked one by one; of more, the corners and each hole's own choices are.
MAX_CHOICES = 16
#: A program whose expressions have more terms than this, names substituted, is refused.
MAX_TOTAL_NODES = 50_000


def check(
    program: Program, limits: Limits | None = None, *, filled: bool = False, tolerated: frozenset[str] = frozenset()
) -> tuple[Diagnostic, ...]:
    """Every error and warning, in textual order.

    limits: what a target allows one block; checked for programs without holes. filled: holes are errors. tolerated: names that
    are not reported as unknown (they stand in lines that could not be read).
    """
    report = Report()
    if program.stage == "sketch":
        _sketch(program, report)
    else:
        _code(program, limits, report, tolerated)
    if filled:
        for name, hole in program.holes.items():
            choices = ", ".join(map(str, hole.choices))
            report.error("hole", f"{name} is left to choose", hole.span, f"choose one of {choices}", "one value", choices)
    return in_order(_telling(report.found))


def _telling(found: list[Diagnostic]) -> list[Diagnostic]:
    """Without warnings that may only follow from an error: those of its line, and what is unused."""
    wrong_lines = {d.span.line for d in found if d.severity == "error"}

    def tells(d: Diagnostic) -> bool:
        return d.severity == "error" or (d.span.line not in wrong_lines and not (wrong_lines and d.code == "unused"))

    return [d for d in found if tells(d)]


def parse_and_check(
    text: str | bytes, stage: Stage | None = None, limits: Limits | None = None, *, filled: bool = False
) -> Parsed:
    """`parse`, then `check` on whatever could be read: all findings together. `program` is None if there is any error."""
    parsed = parse(text, stage)
    if parsed.recovered is None:
        return parsed
    found = check(parsed.recovered, limits, filled=filled, tolerated=parsed.broken)
    if parsed.program is None:
        found = tuple(d for d in found if d.code not in _NEEDS_ALL_LINES)
    diagnostics = in_order((*parsed.diagnostics, *found))
    return replace(parsed, program=None if has_errors(diagnostics) else parsed.program, diagnostics=diagnostics)


#: Findings about what is missing: not to be trusted while lines are missing from the program.
_NEEDS_ALL_LINES = frozenset(
    {"unused", "no-value", "missing-reshape", "output-not-written", "no-output", "ragged", "race", "gemm"}
)


def _sketch(program: Program, report: Report) -> None:
    """A sketch says little that could be wrong: declarations and shapes that belong to code, and arities."""
    for s in walk_statements(program.body):
        if isinstance(s, Argument | Grid | Allocate) or (isinstance(s, Copy) and s.shape):
            what = "the shape of a Copy" if isinstance(s, Copy) else type(s).__name__
            report.error("stage", f"{what} belongs to code", s.span, "a sketch says what moves and what is computed")
        for top in expressions_of(s):
            for e in walk(top):
                if isinstance(e, Op) and e.fn in FUNCTIONS and len(e.args) != FUNCTIONS[e.fn]:
                    needed = FUNCTIONS[e.fn]
                    report.warning("arity", f"{e.fn} takes {needed} argument(s), found {len(e.args)}", e.span)


def _code(program: Program, limits: Limits | None, report: Report, tolerated: frozenset[str]) -> None:
    scope = Scope.of(program, report, tolerated)
    check_statements(program.body, scope)
    check_matrices(program, report)
    check_unused_names(program, report)
    check_sentinels(program, report)
    nodes = sum(sizes(e, scope.let_sizes)[0] for s in walk_statements(program.body) for e in expressions_of(s))
    if any(d.code == "too-large" for d in report.found):
        return
    if nodes > MAX_TOTAL_NODES:
        report.found.append(too_large("the program", program.body[-1].span, MAX_TOTAL_NODES))
        return
    _core(program, limits, report, scope.silent, MAX_TOTAL_NODES // nodes if nodes else 1)
    _accidental_products(program, report)


def _core(program: Program, limits: Limits | None, report: Report, silent: set[str], most_choices: int) -> None:
    """What core code shows, for the ways to fill the holes (so many at most)."""
    by_choice: list[tuple[dict[str, int], tuple[Diagnostic, ...]]] = []
    for choice in islice(_choices(program), max(most_choices, 1)):
        part = Report()
        core = lower(fill(program, choice))
        bounds = Bounds.of(core)
        check_flow(core, part, bounds, silent)
        check_ranges(core, part, bounds)
        if not has_errors((*report.found, *part.found)):
            check_races(core, part)
            liveness = check_liveness(core, mentioned_names(program), part)
            if limits is not None and not choice:
                check_limits(core, liveness, limits, part)
        by_choice.append((choice, in_order(part.found)))
    report.found += _together(by_choice)


def _together(by_choice: list[tuple[dict[str, int], tuple[Diagnostic, ...]]]) -> list[Diagnostic]:
    """What every choice shows, as it is; of what only some show, the first of each kind and place, with its choice."""
    everywhere = set.intersection(*({*found} for _, found in by_choice))
    out = [d for d in by_choice[0][1] if d in everywhere]
    said = {(d.code, d.span) for d in out}
    for choice, found in by_choice:
        new = [d for d in found if (d.code, d.span) not in said]
        said |= {(d.code, d.span) for d in new}
        names = ", ".join(f"{name} = {value}" for name, value in choice.items())
        out += [replace(d, message=f"{d.message} (with {names})") for d in new]
    return out


def _choices(program: Program) -> Iterator[dict[str, int]]:
    holes = program.holes
    number = 1
    for hole in holes.values():
        number *= max(len(hole.choices), 1)
    if number <= MAX_CHOICES:
        yield from hole_choices(program)
        return
    first = {name: hole.choices[0] for name, hole in holes.items()}
    yield first
    yield {name: hole.choices[-1] for name, hole in holes.items()}
    for name, hole in holes.items():
        for value in hole.choices[1:]:
            yield {**first, name: value}


def _accidental_products(program: Program, report: Report) -> None:
    """A GEMM whose numbers agree but whose names do not: BN happens to equal D, and an operand is used the wrong way round."""
    shapes = tile_shapes(program.body)
    wrong_lines = {d.span.line for d in report.found if d.severity == "error"}
    for s in walk_statements(program.body):
        if not isinstance(s, Gemm) or s.span.line in wrong_lines:
            continue
        fitting = transpositions(s, shapes)
        if fitting and (s.a_transposed, s.b_transposed) not in fitting:
            stated = f"{s.a}{'^T' * s.a_transposed}, {s.b}{'^T' * s.b_transposed}"
            meant = " or ".join(f"{s.a}{'^T' * a}, {s.b}{'^T' * b}" for a, b in fitting)
            message = f"GEMM {stated} contracts axes of different names, whose sizes are equal by accident"
            report.error("transposed", message, s.span, f"did you mean GEMM {meant}?", meant, stated)
