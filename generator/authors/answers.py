"""Finds the program in a model's answer. The text is hostile: it is cut, never evaluated, and nothing in it is believed."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Characters of an answer that are looked at, and of one block that is kept.
MAX_ANSWER_CHARS = 400_000
MAX_BLOCK_CHARS = 100_000

#: Info strings that models give to each kind of block.
TAGS: dict[str, tuple[str, ...]] = {
    "sketch": ("sketch", "tl-sketch", "tl_sketch"),
    "tl": ("tl", "tl-code", "tl_code", "thinking-language", "thinking_language"),
    "source": ("cuda", "cu", "cpp", "c++", "cxx", "c"),
    "launch": ("json", "launch"),
}

_FENCE = re.compile(r"^[ \t]{0,3}(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)$")
#: Characters that show nothing, turn the direction of what follows, or say something that a person does not see (tag characters).
_INVISIBLE = dict.fromkeys(
    [0x00, 0x00AD, 0x034F, 0x061C, 0x180E, 0xFEFF, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070)]
    + [*range(0xFE00, 0xFE10), *range(0xFFF9, 0xFFFC), *range(0xE0000, 0xE0200)]
)
#: Control characters of both sets, and separators that are line ends to some programs and none to others.
_CONTROL = dict.fromkeys([*range(1, 9), 11, 12, *range(14, 32), *range(127, 160), 0x2028, 0x2029], " ")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its info string in lower case and its text. `closed` is False where the answer ended inside it."""

    tag: str
    text: str
    closed: bool


@dataclass(frozen=True, slots=True)
class Extracted:
    """Blocks by kind, the last of each kind winning (models correct themselves at the end), and remarks on what was cut."""

    blocks: dict[str, str]
    remarks: tuple[str, ...]

    def get(self, kind: str) -> str | None:
        return self.blocks.get(kind)


def clean(text: str) -> str:
    """Line ends unified; invisible, bidirectional and control characters removed; cut to MAX_ANSWER_CHARS."""
    text = text[:MAX_ANSWER_CHARS].replace("\r\n", "\n").replace("\r", "\n")
    text = text.translate(_INVISIBLE).translate(_CONTROL)
    return text.encode("utf-8", "replace").decode("utf-8")


def fenced_blocks(text: str) -> tuple[Block, ...]:
    """Every fenced block in order. One pass over the lines; a fence closes with the same character, at least as long."""
    blocks: list[Block] = []
    fence, tag, lines = "", "", [""]
    for line in text.split("\n"):
        match = _FENCE.match(line) if len(line) < 200 else None
        if not fence and match:
            fence, tag, lines = match["fence"], match["info"].strip().lower().split(" ")[0], []
        elif (
            fence and match and not match["info"].strip() and match["fence"][0] == fence[0] and len(match["fence"]) >= len(fence)
        ):
            blocks.append(Block(tag, "\n".join(lines) + "\n", True))
            fence = ""
        elif fence:
            lines.append(line)
    if fence:
        blocks.append(Block(tag, "\n".join(lines) + "\n", False))
    return tuple(blocks)


def extract(text: str) -> Extracted:
    """The blocks of an answer by kind; a program outside any fence is found by its `Kernel` line."""
    remarks: list[str] = []
    if len(text) > MAX_ANSWER_CHARS:
        remarks.append(f"the answer has {len(text):,} characters; only the first {MAX_ANSWER_CHARS:,} were read")
    cleaned = clean(text)
    blocks: dict[str, str] = {}
    too_long: set[str] = set()
    for block in fenced_blocks(cleaned):
        kind = _kind(block)
        if kind is None:
            continue
        if len(block.text) > MAX_BLOCK_CHARS:
            remarks.append(f"the {kind} block has {len(block.text):,} characters; at most {MAX_BLOCK_CHARS:,} are taken")
            too_long.add(kind)
            continue
        if not block.closed:
            remarks.append(f"the answer ends inside its {kind} block")
        blocks[kind] = block.text
    if "tl" not in blocks and "tl" not in too_long and (bare := _bare_program(cleaned)):
        remarks.append("the program stands outside any fenced block")
        blocks["tl"] = bare
    return Extracted(blocks, tuple(remarks))


def _kind(block: Block) -> str | None:
    for kind, tags in TAGS.items():
        if block.tag in tags:
            return kind
    if block.tag in ("", "text", "txt", "plaintext") and re.search(r"^\s*Kernel\s+\w+", block.text, re.MULTILINE):
        return "tl"
    return None


def _bare_program(text: str) -> str | None:
    """From the last `Kernel NAME` line that stands outside a fence to the last line that starts like a statement."""
    starts = [m.start() for m in re.finditer(r"^Kernel[ \t]+\w+[ \t]*$", text, re.MULTILINE)]
    if not starts:
        return None
    words = (
        "Kernel",
        "Argument",
        "Constant",
        "Grid",
        "Let",
        "Allocate",
        "Hint",
        "Copy",
        "Compute",
        "Reshape",
        "for",
        "if",
        "else",
        "end",
        "#",
    )
    lines = text[starts[-1] :][:MAX_BLOCK_CHARS].split("\n")
    last = max(i for i, line in enumerate(lines) if line.strip().startswith(words))
    return "\n".join(lines[: last + 1]) + "\n"


def estimate_tokens(text: str) -> int:
    """An upper estimate where no tokenizer is at hand: one token for three bytes of UTF-8."""
    return -(-len(text.encode("utf-8", "replace")) // 3)
