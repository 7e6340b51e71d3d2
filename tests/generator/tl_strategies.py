"""Random programs for property tests: any tree that the parser could give, sound or not."""

from hypothesis import strategies as st

from generator.tl.ir import (
    DTYPES,
    FUNCTIONS,
    LEVELS,
    Allocate,
    Argument,
    Axis,
    Compute,
    Constant,
    Copy,
    For,
    Gemm,
    Grid,
    Hint,
    If,
    Index,
    Let,
    Named,
    Num,
    Op,
    Option,
    Program,
    Prose,
    Reshape,
    Var,
)

NAMES = st.sampled_from(
    ["S", "acc", "row_max", "kv", "q", "SeqK", "BM", "Inf_", "T", "x1", "_y", "positive", "L", "D", "and_", "offset"]
)
#: No statement gives these a shape, so that nothing is inferred about a GEMM that reads them.
OPERANDS = st.sampled_from(["GA", "GB", "GC"])
NUMBERS = st.one_of(
    st.integers(-(2**63) + 1, 2**63 - 1).map(Num), st.floats(allow_nan=False).map(Num), st.sampled_from([0, 1, 128]).map(Num)
)


def _operations(inner):
    def of(fn):
        return st.tuples(*[inner] * FUNCTIONS[fn]).map(lambda args: Op(fn, args))

    return st.one_of(
        st.sampled_from(sorted(FUNCTIONS)).flatmap(of),
        st.builds(Index, NAMES, st.lists(inner, max_size=2).map(tuple)),
        st.builds(Op, st.sampled_from(["softcap", "f"]), st.lists(inner, max_size=4).map(tuple)),
    )


EXPRESSIONS = st.recursive(NUMBERS | NAMES.map(Var), _operations, max_leaves=12)
DTYPE = st.sampled_from(DTYPES)
LEVEL = st.sampled_from(LEVELS)


def _tuple(strategy, least=0, most=2):
    return st.lists(strategy, min_size=least, max_size=most).map(tuple)


@st.composite
def copies(draw, shaped):
    shape = draw(_tuple(EXPRESSIONS, 0, 2)) if shaped else ()
    coordinate = tuple(draw(EXPRESSIONS) for _ in shape)
    return Copy(draw(NAMES), draw(NAMES), shape, coordinate, draw(LEVEL), draw(LEVEL))


COMMON = st.one_of(
    st.builds(Gemm, OPERANDS, st.booleans(), OPERANDS, st.booleans(), NAMES, st.booleans()),
    st.builds(Compute, NAMES, EXPRESSIONS),
    st.builds(
        Named, st.sampled_from(["Softmax", "Normalize", "RoPE"]), _tuple(NAMES, 1, 3), st.none() | NAMES, _tuple(NAMES, 0, 3)
    ),
    st.builds(Reshape, NAMES, _tuple(NAMES, 1, 3), _tuple(NAMES, 1, 3), NAMES, DTYPE),
    st.builds(Let, NAMES, EXPRESSIONS),
    st.builds(Constant, NAMES, _tuple(st.integers(-5, 2**40), 1, 4)),
    st.builds(Hint, NAMES, st.sampled_from(["2", "on", "1.5", "grouped"])),
    st.builds(Option, NAMES, st.sampled_from(["deferred", "fast"])),
)
DECLARATIONS = st.one_of(
    st.builds(Argument, _tuple(NAMES, 1, 3), DTYPE, st.booleans()),
    st.builds(Grid, _tuple(st.builds(Axis, NAMES, EXPRESSIONS), 1, 3)),
    st.builds(Allocate, NAMES, LEVEL, _tuple(EXPRESSIONS), DTYPE, _tuple(EXPRESSIONS), st.none() | EXPRESSIONS),
)
PROSE = st.sampled_from(
    ["then hide what nobody may see", "Compute P = S, scaled", "Copy the keys of this tile", "ask again"]
).map(Prose)


def _blocks(statements):
    def nested(inner):
        body = st.lists(inner, max_size=3).map(tuple)
        return st.one_of(
            st.builds(For, NAMES, EXPRESSIONS, EXPRESSIONS, st.booleans(), body), st.builds(If, EXPRESSIONS, body, body)
        )

    return st.recursive(statements, nested, max_leaves=6)


@st.composite
def codes(draw):
    anchor = Allocate("anchor", "global", (Num(1),), "f32")
    body = draw(st.lists(_blocks(st.one_of(COMMON, copies(True), DECLARATIONS)), max_size=8))
    return Program(draw(st.sampled_from(["kernel", "attention_2"])), "code", (anchor, *body))


@st.composite
def sketches(draw):
    body = draw(st.lists(_blocks(st.one_of(COMMON, copies(False), PROSE)), min_size=1, max_size=8))
    if draw(st.booleans()):
        body = [*body, Prose("for each tile that a row can see"), *body, Prose("end")]
    first = draw(COMMON)
    return Program(draw(st.sampled_from(["", "sketch_1"])), "sketch", (first, *body))
