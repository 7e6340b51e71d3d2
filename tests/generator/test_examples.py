"""The tutorial programs: each one checks, prints and reads back, and gives what its header says it computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dense_attention import ROUND, Arrays, attention, random_call

from generator.authors.reasoning import erase
from generator.authors.rules import RuleAuthor
from generator.binding import bind
from generator.spec import AttentionSpec, Rule
from generator.tl.checker import parse_and_check
from generator.tl.expand import expand
from generator.tl.fill import fill, hole_choices
from generator.tl.header import Header, HeaderError, read_header
from generator.tl.interpreter import run
from generator.tl.ir import Program
from generator.tl.memory import matrix_shapes
from generator.tl.parser import parse, parse_or_raise
from generator.tl.printer import print_program

FOLDER = Path(__file__).parents[2] / "examples" / "tl"
FILES = sorted(path.name for path in FOLDER.glob("*.tl"))
CODE = [name for name in FILES if name != "sketch.tl"]
OF_TL = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}
TOLERANCE = {"f32": 2e-6, "f16": 2**-9, "bf16": 2**-6}


def program_of(name: str) -> Program:
    return parse_or_raise((FOLDER / name).read_text())


def cases(name: str, program: Program) -> list[tuple[Arrays, dict[str, int | float], Arrays]]:
    """(inputs, scalars, expected outputs) at every size of the header."""
    header = read_header((FOLDER / name).read_text())
    assert header.runs, f"{name} names no sizes"
    return [attention_case(program, spec) for spec in header.specs] or [
        other_case(program, sizes, header) for sizes in header.runs
    ]


def attention_case(program: Program, spec: AttentionSpec) -> tuple[Arrays, dict[str, int | float], Arrays]:
    call = random_call(spec)
    binding = bind(program, spec)
    inputs = {t.name: call[t.name].reshape(t.parameter_shape(spec)) for t in binding.tensors if not t.written}
    wanted = dict(zip(("O", "LSE"), attention(spec, call), strict=True))
    return inputs, binding.values, {t.name: wanted[t.name].reshape(t.parameter_shape(spec)) for t in binding.tensors if t.written}


def other_case(program: Program, sizes: dict[str, int | float], header: Header) -> tuple[Arrays, dict[str, int | float], Arrays]:
    core = expand(next(fill(program, choice) for choice in hole_choices(program)))
    rng = np.random.default_rng(0)
    inputs = {}
    shapes = matrix_shapes(core, sizes)
    for name, shape in shapes.items():
        dtype = core.allocations[name].dtype
        if name not in core.outputs:
            inputs[name] = rng.integers(0, 2, shape) if dtype == "i32" else ROUND[OF_TL[dtype]](rng.standard_normal(shape))
    inputs |= header.made_inputs(FOLDER, shapes, sizes, 0)
    return inputs, sizes, header.reference(FOLDER)(inputs, sizes)


@pytest.mark.parametrize("name", FILES)
def test_checks_prints_and_reads_back(name: str) -> None:
    parsed = parse_and_check((FOLDER / name).read_text())
    assert parsed.program is not None and parsed.diagnostics == ()
    assert parsed.program.stage == ("sketch" if name == "sketch.tl" else "code")
    assert parse(print_program(parsed.program)).program == parsed.program


@pytest.mark.parametrize("name", CODE)
def test_computes_what_its_header_says(name: str) -> None:
    program = program_of(name)
    for inputs, scalars, expected in cases(name, program):
        for choice in hole_choices(program):
            exact = run(fill(program, choice), inputs, scalars, precision="exact")
            stated = run(fill(program, choice), inputs, scalars)
            assert set(exact) == set(expected)
            for output, wanted in expected.items():
                np.testing.assert_allclose(exact[output], wanted, atol=1e-11)
                tolerance = TOLERANCE[program.allocations[output].dtype] * np.abs(wanted[np.isfinite(wanted)]).max(initial=1.0)
                np.testing.assert_allclose(stated[output], wanted, atol=tolerance)


def test_the_sketch_is_that_of_the_first_program() -> None:
    assert erase(program_of("causal.tl")).body == program_of("sketch.tl").body


def test_the_rule_author_writes_the_same_sketch() -> None:
    spec = read_header((FOLDER / "causal.tl").read_text()).spec
    assert spec is not None
    assert RuleAuthor().sketch(spec).body == program_of("sketch.tl").body


HEADER = """\
# A program.
# oracle: attention
# spec: heads=4/2 dim=64/32 dtype=bf16 mask=window(left=9,right=-1) mask=causal(align=top_left) score=softcap(cap=30.5) scale=-0.5
# run: batch=2 seqlen_q=10 seqlen_k=13
# run: batch=1 seqlen_q=1 seqlen_k=2
Kernel k
# run: batch=9 seqlen_q=9 seqlen_k=9
"""


def test_header_of_an_attention_program() -> None:
    header = read_header(HEADER)
    assert [str(s) for s in header.specs] == [
        "2x4/2 10x13 d64/32 bf16 window(left=9, right=-1) causal(align=top_left) softcap(cap=30.5)",
        "1x4/2 1x2 d64/32 bf16 window(left=9, right=-1) causal(align=top_left) softcap(cap=30.5)",
    ]
    assert header.spec is not None and header.spec.scale == -0.5 and header.spec.masks[0] == Rule.make("window", left=9, right=-1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "# spec: heads=4 dim=64 colour=red",
            "line 2: spec: expected heads, dim, dtype, mask, score, phase or scale, found 'colour'",
        ),
        ("# spec: heads=4/x dim=64", "line 2: heads: expected a number, found 'x'"),
        ("# spec: heads=4/3 dim=64", "line 2: spec: num_kv_heads: expected a divisor of num_heads = 4, found 3"),
        ("# spec: dim=64", "line 2: spec: expected heads=..., found none"),
        ("# spec: four heads", "line 2: spec: expected NAME=VALUE words, found 'four heads'"),
        ("# spec: heads=4 dim=64\n# run: batch=1", "line 3: run: expected batch, seqlen_q, seqlen_k, found batch"),
        ("# spec: heads=4 dim=64\n# run: batch=a", "line 3: run: batch: expected a number, found 'a'"),
        ("# spec: heads=4 dim=64\n# spec: heads=4 dim=64", "line 3: spec: expected once, found again"),
        ("# spec: heads=4 dim=64", "run: expected a line such as"),
        ("", "spec: expected a line such as"),
    ],
)
def test_wrong_headers_name_the_line(line: str, message: str) -> None:
    text = f"# oracle: attention\n{line}\n" + ("# run: batch=1 seqlen_q=2 seqlen_k=3\n" if "run" not in line + message else "")
    with pytest.raises(HeaderError, match=message):
        read_header(text)


def test_reference_that_is_not_there() -> None:
    with pytest.raises(
        HeaderError, match="oracle: expected attention or FILE.py:FUNCTION with a file in .*, found 'nothing.py:f'"
    ):
        read_header("# oracle: nothing.py:f").reference(FOLDER)
    with pytest.raises(HeaderError, match="oracle: expected a function of references.py, found 'gem'"):
        read_header("# oracle: references.py:gem").reference(FOLDER)
    with pytest.raises(HeaderError, match=r"inputs: expected a function of references.py, found 'page'"):
        read_header("# oracle: references.py:gemm\n# inputs: references.py:page").made_inputs(FOLDER, {}, {}, 0)
