"""What source text that a model or a stranger wrote, in C++ or CUDA, may hold before anyone compiles it. Our translators' output
needs none of it.

A first wall, not the last: what is compiled is checked for its imports, too, and runs in the sandbox.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Literal

from generator.translate.direct.headers import CPU_HEADERS, CUDA_HEADERS

Language = Literal["c++", "cuda"]

MAX_SOURCE_BYTES = 1 << 20

#: Device headers of the CUDA toolkit: where there is none, source that includes one cannot be compiled.
TOOLKIT_HEADERS = frozenset(
    {"cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h", "mma.h", "cuda_pipeline.h", "cuda_pipeline_primitives.h"}
    | {"cuda/barrier", "cuda/pipeline", "cuda/std/cstdint", "cooperative_groups.h"}
)
#: Headers that hold intrinsics, maths, fixed-width types or device code, and nothing that touches the system; besides our own.
ALLOWED_HEADERS: dict[Language, frozenset[str]] = {
    "c++": frozenset({"immintrin.h", "stdint.h", "stddef.h", "cstdint", "cstddef", "math.h", "cmath", "string.h", "cstring"})
    | frozenset(CPU_HEADERS),
    "cuda": TOOLKIT_HEADERS | frozenset(CUDA_HEADERS),
}

#: Why words are refused.
_SYSTEM = "a kernel computes; it calls no system"
_LOADING = "code may not load, find or make other code"
_LINKAGE = "what runs before the entry point, or instead of something else, is refused"
_HOST = "host code is never accepted: a kernel is device code and a launch description"
_PROBES, _LOOKS = ("__has_include", "__has_include_next", "__has_embed"), "source may not ask what files this machine has"
#: Words that no kernel needs -> why they are refused.
FORBIDDEN_WORDS: dict[Language, dict[str, str]] = {
    "c++": {
        **dict.fromkeys(
            ("asm", "__asm", "__asm__"), "inline assembly is not accepted on a CPU: use the intrinsics of immintrin.h"
        ),
        **dict.fromkeys(
            ("syscall", "__syscall", "fork", "vfork", "execve", "execv", "execl", "system", "popen", "kill", "ptrace"), _SYSTEM
        ),
        **dict.fromkeys(
            ("open", "openat", "fopen", "socket", "connect", "mmap", "mprotect", "munmap", "getenv", "signal", "sigaction"),
            _SYSTEM,
        ),
        **dict.fromkeys(("exit", "_exit", "abort", "longjmp", "atexit", "pthread_create", "environ", "__environ"), _SYSTEM),
        **dict.fromkeys(("dlopen", "dlsym", "dlmopen", "dl_iterate_phdr"), _LOADING),
        **dict.fromkeys(("constructor", "destructor", "ifunc", "section", "alias", "weak", "weakref", "visibility"), _LINKAGE),
        **dict.fromkeys(
            (
                "_init",
                "_fini",
                "__constructor__",
                "__destructor__",
                "__ifunc__",
                "__section__",
                "__alias__",
                "__weak__",
                "init_priority",
            ),
            _LINKAGE,
        ),
        **dict.fromkeys(
            ("new", "delete", "throw", "catch", "dynamic_cast", "typeid", "import", "module"), "not in a freestanding kernel"
        ),
        **dict.fromkeys(_PROBES, _LOOKS),
        "main": _HOST,
    },
    "cuda": {
        **dict.fromkeys(
            ("__host__", "main", "cudaMalloc", "cudaFree", "cudaMemcpy", "cudaLaunchKernel", "cuLaunchKernel"), _HOST
        ),
        **dict.fromkeys(("printf", "malloc", "free", "assert"), "not in a kernel that is timed"),
        **dict.fromkeys(("constructor", "destructor", "section", "alias", "weak"), _LINKAGE),
        **dict.fromkeys(_PROBES, _LOOKS),
    },
}

#: PTX that reaches beyond the kernel's own memory and grid.
_FORBIDDEN_PTX = re.compile(r"\b(brkpt|trap|exit|call|pmevent|nanosleep|applypriority|multimem|\.sys)\b")

_DIRECTIVES = ("define", "undef", "if", "ifdef", "ifndef", "elif", "else", "endif", "pragma", "include", "error")
_PRAGMAS = re.compile(
    r"^\s*(GCC\s+unroll\s+\d+|GCC\s+ivdep|unroll(\s+\d+|\s*\(\s*\d+\s*\))?|once|clang\s+loop\s+unroll\([a-z]+\))\s*$"
)
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<raw>(?:u8|u|U|L)?R"(?P<d>[^()\\\s]{0,16})\(.*?\)(?P=d)")"""
    r"""|(?P<string>"(?:\\.|[^"\\\n])*")|(?P<open>/\*|(?:u8|u|U|L)?R"|")"""
    r"""|(?P<number>\.?\d(?:[eEpP][+-]|'\w|[\w.])*)|(?P<char>'(?:\\.|[^'\\\n])*')|(?P<word>[A-Za-z_]\w*)"""
    r"""|(?P<newline>\n)|(?P<blank>[ \t\r]+)|(?P<other><+|->|.)""",
    re.DOTALL,
)


#: All but tabs and line ends: a lone carriage return ends a comment for one compiler and not for another.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r(?!\n)")
#: Escapes that write a letter as its number: PTX has to be readable as it stands.
_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\[0-7xuUN]")


@dataclass(frozen=True, slots=True)
class Violation:
    line: int
    message: str


def violations(source: str, language: Language) -> tuple[Violation, ...]:
    """Everything in the text that is refused, by line; empty: it may be compiled in a sandbox. One pass, linear in its length."""
    if len(source.encode("utf-8", "replace")) > MAX_SOURCE_BYTES:
        return (Violation(1, f"the source is longer than {MAX_SOURCE_BYTES >> 20} MiB"),)
    if control := _CONTROL.search(source):
        line = source.count("\n", 0, control.start()) + 1
        return (Violation(line, f"control character {control[0]!r}: only tabs and ends of lines are accepted"),)
    if spliced := re.search(r"\\[ \t]*\n", _without_macros(source)):
        return (Violation(source.count("\n", 0, spliced.start()) + 1, "a line may be continued in a #define only"),)
    tokens = _tokens(source)
    if tokens and tokens[-1].kind == "open":
        return (Violation(tokens[-1].line, "a comment or string does not end"),)
    code = "".join("\n" * t.text.count("\n") + " " if t.kind == "comment" else t.text for t in tokens)
    if odd := re.search(r"[^\x00-\x7f]", code):
        line = code.count("\n", 0, odd.start()) + 1
        return (
            Violation(
                line, f"character {odd[0]!r} outside a comment: source has to be ASCII, so that what is read is what is compiled"
            ),
        )
    if alternative := re.search(r"\?\?|<:|:>|<%|%>|%:", code):
        return (Violation(code.count("\n", 0, alternative.start()) + 1, "digraphs and trigraphs are not accepted"),)
    return (*_directive_violations(code, language), *_word_violations(tokens, language))


def toolkit_includes(source: str) -> tuple[str, ...]:
    """Headers of the CUDA toolkit that the text includes, sorted."""
    named = re.findall(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]{1,80})[>"]', source, re.MULTILINE)
    return tuple(sorted(TOOLKIT_HEADERS.intersection(named)))


#: Kinds of tokens between two strings that a compiler takes for one.
_SPACE = ("comment", "newline", "blank")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


def _tokens(source: str) -> list[_Token]:
    """The source cut into comments, strings, words and the rest; ends at a comment or string that does not end ("open")."""
    tokens, line = [], 1
    for match in _TOKEN.finditer(source):
        kind = "raw" if match.lastgroup == "d" else match.lastgroup or "other"
        tokens.append(_Token(kind, match[0], line))
        if kind == "open":
            break
        line += match[0].count("\n")
    return tokens


def _without_macros(source: str) -> str:
    """The text with the bodies of `#define`s blanked: the one place where lines may be continued."""
    return re.sub(
        r"^[ \t]*#[ \t]*define\b(?:[^\n\\]|\\[^\n]|\\\n)*", lambda m: "\n" * m[0].count("\n"), source, flags=re.MULTILINE
    )


def _directive_violations(source: str, language: Language) -> list[Violation]:
    found = []
    lines, continued = source.split("\n"), 0
    for number, line in enumerate(lines, 1):
        match = re.match(r"\s*#\s*(\w*)(.*)$", line)
        if not match or number <= continued:
            continue
        name, rest = match[1], match[2]
        if name == "define":
            continued = _last_line(lines, number)
            rest = "\n".join([rest, *lines[number:continued]])
        if name not in _DIRECTIVES and name:
            found.append(Violation(number, f"#{name} is not accepted; allowed: {', '.join(_DIRECTIVES)}"))
        elif name == "include":
            found += _include_violations(number, rest, language)
        elif name == "pragma" and not _PRAGMAS.match(re.sub(r"//.*|/\*.*?\*/", "", rest)):
            found.append(Violation(number, "only `#pragma unroll` and `#pragma GCC unroll N` are accepted"))
        elif name == "define" and re.search(r"##|\binclude\b|\b_Pragma\b", rest):
            found.append(
                Violation(number, "a macro may not paste tokens (##) or make directives: words must be readable as they stand")
            )
    return found


def _ptx_violations(tokens: list[_Token]) -> list[Violation]:
    """What strings hold that may be PTX; strings that stand side by side are one."""
    found: list[Violation] = []
    for of_strings, run in itertools.groupby((t for t in tokens if t.kind not in _SPACE), lambda t: t.kind in ("string", "raw")):
        strings = list(run) if of_strings else []
        if any(t.kind == "string" and _ESCAPE.search(t.text) for t in strings):
            said = "a letter of a string is written as its number: PTX has to be readable as it stands"
            found.append(Violation(strings[0].line, said))
        elif ptx := _FORBIDDEN_PTX.search("".join(map(_inner, strings))):
            found.append(Violation(strings[0].line, f"PTX {ptx[0]}: a kernel stays inside its own grid"))
    return found


def _inner(token: _Token) -> str:
    """The text within a string's quotes."""
    text = token.text[token.text.index('"') + 1 : -1]
    return text[text.index("(") + 1 : text.rindex(")")] if token.kind == "raw" else text


def _last_line(lines: list[str], number: int) -> int:
    """Where a directive ends that begins on a line and goes on behind each backslash; lines count from 1."""
    while number < len(lines) and lines[number - 1].rstrip().endswith("\\"):
        number += 1
    return number


def _include_violations(line: int, rest: str, language: Language) -> list[Violation]:
    match = re.match(r'\s*[<"]([^>"]*)[>"]\s*(//.*|/\*.*\*/\s*)?$', rest)
    if match and match[1] in ALLOWED_HEADERS[language]:
        return []
    name = match[1] if match else rest.strip()
    return [Violation(line, f"#include {name[:60]} is not accepted; allowed: {', '.join(sorted(ALLOWED_HEADERS[language]))}")]


def _word_violations(tokens: list[_Token], language: Language) -> list[Violation]:
    found: list[Violation] = []
    forbidden = FORBIDDEN_WORDS[language]
    previous = ""
    for token in tokens:
        if token.kind == "word" and token.text in forbidden and previous not in (".", "->"):
            found.append(Violation(token.line, f"{token.text}: {forbidden[token.text]}"))
        if token.kind == "word" and token.text == "_Pragma":
            found.append(Violation(token.line, "_Pragma is not accepted"))
        if language == "cuda" and "<<<" in token.text and token.kind == "other":
            found.append(Violation(token.line, f"<<<: {_HOST}"))
        if token.kind != "comment" and not token.text.isspace():
            previous = token.text
    return found + (_ptx_violations(tokens) if language == "cuda" else [])
