"""Lines of emitted code with indentation by braces. Knows no language beyond that."""

from __future__ import annotations

from collections.abc import Iterable


class Writer:
    """Collects lines; one that ends in `{` indents what follows, one that starts with `}` ends that."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0

    def __call__(self, *lines: str) -> None:
        for line in lines:
            if not line and self._lines and not self._lines[-1]:
                continue
            if line.startswith("}"):
                self._depth -= 1
            self._lines.append("  " * self._depth + line if line else "")
            if line.endswith("{"):
                self._depth += 1

    def raw(self, text: str) -> None:
        """Text that is laid out already."""
        self._lines.extend(text.rstrip("\n").split("\n"))

    def block(self, lines: Iterable[str]) -> None:
        self(*lines)

    @property
    def text(self) -> str:
        assert self._depth == 0, "unbalanced braces"
        return "\n".join(self._lines) + "\n"
