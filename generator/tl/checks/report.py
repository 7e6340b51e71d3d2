"""Where checks put their findings, and how they spell shapes. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from generator.tl.diagnostics import Diagnostic, Severity
from generator.tl.ir import Expr, Span
from generator.tl.printer import print_expression


@dataclass(slots=True)
class Report:
    """Findings in the order found."""

    found: list[Diagnostic] = field(default_factory=list)

    def error(self, code: str, message: str, span: Span, hint: str = "", expected: str = "", found: str = "") -> None:
        self._add(code, "error", message, span, hint, expected, found)

    def warning(self, code: str, message: str, span: Span, hint: str = "") -> None:
        self._add(code, "warning", message, span, hint)

    def _add(
        self, code: str, severity: Severity, message: str, span: Span, hint: str = "", expected: str = "", found: str = ""
    ) -> None:
        self.found.append(Diagnostic(code, severity, message, span, hint, expected, found))


def shape_text(shape: Iterable[int | Expr]) -> str:
    """`(128, 64)`, or `(BM, D)` of expressions."""
    return f"({', '.join(str(x) if isinstance(x, int) else print_expression(x) for x in shape)})"


def name_list(names: Sequence[str], most: int = 8) -> str:
    """A few names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
