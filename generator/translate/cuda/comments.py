"""One line of TL for each statement, as a comment in emitted code."""

from __future__ import annotations

from generator.tl.ir import For, If, Stmt
from generator.tl.printer import print_expression, print_statement
