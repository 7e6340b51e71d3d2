"""Launch descriptions as hostile data: right ones give the translators' record, each wrong field is one problem that names it."""

import copy
import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_cuda import device_source, launch_text

from generator.binding import bind
from generator.canonical import canonical_json
from generator.spec import AttentionSpec, Rule
from generator.targets import find_target
from generator.translate.direct import CPU_FIELDS, CUDA_FIELDS, NotALaunch, read_direct, read_launch
from generator.translate.direct.reading import MAX_TEXT
from generator.translate.direct.tensor_maps import MAP_FIELDS
from generator.translate.records import Launch, Translated, launch_from_plain
from verifier.cuda_arguments import PlacedTensor, make_call

SPEC = AttentionSpec(8, 2, 128, 128, 2, 300, 500, "bf16", (Rule.make("causal"),))
CPU = {"entry": "kernel", "tensors": ["Q", "K", "V", "O", "LSE"], "scalars": ["scale", "SeqQ", "SeqK"], "positive": ["scale"]}
CUDA = json.loads(launch_text(causal=False))


def read(plain, target, spec=SPEC):
    return read_launch(plain if isinstance(plain, str) else json.dumps(plain), spec, find_target(target))


def changed(plain, path, value):
    """The description with one field set, or taken out where value is Ellipsis."""
    plain = copy.deepcopy(plain)
    *before, last = path
    place = plain
    for step in before:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return plain


def test_a_cpu_description_gives_the_translators_record():
    launch = read(CPU, "cpu-avx512")
    assert isinstance(launch, Launch), launch
    assert [t.name for t in launch.tensors] == CPU["tensors"] and [s.name for s in launch.scalars] == CPU["scalars"]
    assert launch.target_facts == {"isa": "avx512", "family": "direct", "foreign": True} and launch.scalars[0].positive
    assert bind(launch, SPEC).values["SeqK"] == 500
    assert launch_from_plain(json.loads(canonical_json(launch))) == launch, "as a catalog row gives it back"


def test_the_recorded_answers_launch_is_what_its_host_part_did():
    launch = read(CUDA, "sm_90a")
    assert isinstance(launch, Launch), launch
    facts = launch.target_facts
    assert (facts["threads"], facts["cluster"], facts["shared_bytes"]) == (384, [2, 1, 1], 181376)
    assert facts["parameters"]["parts"] == [0, 128, 256, 384] and facts["parameters"]["bytes"] % 64 == 0
    shapes = {"Q": (2, 8, 300, 128), "K": (2, 2, 500, 128), "V": (2, 2, 500, 128), "O": (2, 8, 300, 128), "LSE": (2, 8, 300)}
    tensors = []
    for i, parameter in enumerate(launch.tensors):
        shape = shapes[parameter.name]
        strides = [1] * len(shape)
        for axis in range(len(shape) - 2, -1, -1):
            strides[axis] = strides[axis + 1] * shape[axis + 1]
        tensors.append(PlacedTensor(4096 * (i + 1), shape, tuple(strides)))
    call = make_call(launch, tensors, [s.value for s in bind(launch, SPEC).scalars], num_sms=132)
    assert call.grid == (64, 1, 1), "two query tiles of 256 rows for each of 16 heads, two blocks a cluster"
    q, k, _ = call.maps
    assert (q.extents, q.strides, q.box, q.swizzle_bytes) == ((128, 300, 16), (256, 300 * 256), (64, 128, 1), 128)
    assert (k.extents, k.box) == ((128, 500, 4), (64, 144, 1))
    numbers = memoryview(call.block)[384 + 24 : 384 + 24 + 28].cast("i").tolist()
    assert numbers == [300, 500, 16, 4, 2, 32, 16], (
        "SeqQ, SeqK, heads in all, group, tiles of a head, all tiles, heads of a section"
    )


def test_the_causal_one_takes_tiles_from_a_queue():
    launch = read(launch_text(causal=True), "sm_90a")
    assert isinstance(launch, Launch), launch
    assert launch.target_facts["workspace"] == {"bytes": 4, "zeroed": True, "exclusive": True}
    assert isinstance(read_direct(device_source(), launch_text(causal=True), SPEC, find_target("sm_90a")), Translated)


def test_the_page_shows_every_field_and_descriptions_that_are_read():
    page = (Path(__file__).parents[2] / "docs/direct_author.md").read_text()
    for name in (*CPU_FIELDS, *CUDA_FIELDS, *MAP_FIELDS):
        assert f"`{name}`" in page, name
    cpu, cuda = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert isinstance(found := read(cpu, "cpu-avx2"), Launch), str(found)
    assert isinstance(found := read(cuda, "sm_90a"), Launch), str(found)


WRONG_CPU = [
    (["entry"], "main loop", "launch.entry", "the name of a function"),
    (["entry"], "farm_repack", "launch.entry", "not beginning with farm_"),
    (["entry"], ..., "launch.entry", "it is missing"),
    (["tensors"], ["Q", "K", "V", "O"], "launch.tensors", "LSE is used nowhere"),
    (["tensors", 0], "q", "launch.tensors[0]", "expected one of Q, K, V, O, LSE"),
    (["tensors"], ["Q", "K", "V", "O", "O", "LSE"], "launch.tensors", "a list of 0 to 5"),
    (["tensors"], ["Q", "Q", "V", "O", "LSE"], "launch.tensors", "each of the tensors once"),
    (["scalars", 1], "SeqX", "launch.scalars[1]", "did you mean Seq"),
    (["scalars"], "scale", "launch.scalars", "expected a list"),
    (["isa"], "avx1024", "launch.isa", "expected one of avx2, avx512"),
    (["isa"], "amx", "launch.isa", "expected one of avx2, avx512"),
    (["threads"], 4, "launch.threads", "there is no such field"),
    (["entrry"], "x", "launch.entrry", "did you mean entry?"),
]


@pytest.mark.parametrize(("path", "value", "where", "said"), WRONG_CPU)
def test_each_wrong_field_of_a_cpu_description_is_one_problem(path, value, where, said):
    found = read(changed(CPU, path, value), "cpu-avx512")
    assert isinstance(found, NotALaunch)
    assert [(p.path, said in p.message) for p in found.problems] == [(where, True)], str(found)


STRUCT = ["arguments", 3, "struct"]
WRONG_CUDA = [
    (["grid"], [], "launch.grid", "1 to 3 expressions"),
    (["grid", 0], ["/", "SeqQ", 2], "launch.grid[0]", "[function, argument, ...]"),
    (["grid", 0], ["ceildiv", "SeqQ"], "launch.grid[0]", "ceildiv: expected 2 arguments, found 1"),
    (["grid", 0], ["ceildiv", "SeqQ", 1.5], "launch.grid[0][2]", "whole number"),
    (["grid", 0], "scale", "launch.grid[0]", "a scalar of this call"),
    (["grid", 0], True, "launch.grid[0]", "a number, the name of a scalar"),
    (["grid", 0], 10**400, "launch.grid[0]", "at most 2^53"),
    (["block"], 1025, "launch.block", "from 1 to 1024"),
    (["block"], [64, 64], "launch.block", "at most 1024 threads"),
    (["block"], [64, 0], "launch.block[1]", "from 1 to 1024"),
    (["shared_bytes"], 300_000, "launch.shared_bytes", "from 0 to 232448"),
    (["shared_bytes"], "lots", "launch.shared_bytes", "found lots"),
    (["cluster"], [3, 3], "launch.cluster", "at most 8 blocks"),
    (["workspace"], {"bytes": 1 << 40, "exclusive": True}, "launch.workspace.bytes", "a whole number"),
    (["workspace"], {"bytes": 4}, "launch.workspace.exclusive", "missing"),
    (["tensor_maps", 0, "tensor"], "X", "launch.tensor_maps[0].tensor", "expected one of Q"),
    (["tensor_maps", 0, "box", 1], 257, "launch.tensor_maps[0].box[1]", "from 1 to 256"),
    (["tensor_maps", 0, "box", 0], 128, "launch.tensor_maps[0].box", "a row has 256 bytes"),
    (["tensor_maps", 0, "strides"], [1], "launch.tensor_maps[0].strides", "a list of 2 strides"),
    (["tensor_maps", 0, "strides", 0], 4, "launch.tensor_maps[0].strides[0]", "from 0 to 3"),
    (["tensor_maps", 0, "swizzle_bytes"], 16, "launch.tensor_maps[0].swizzle_bytes", "0, 32, 64 or 128"),
    (["tensor_maps", 0, "interleave"], 16, "launch.tensor_maps[0].interleave", "no such field"),
    (["arguments", 0], {"map": 3}, "launch.arguments[0].map", "from 0 to 2"),
    (["arguments", 0], {"pointer": "Q"}, "launch.arguments[0].pointer", "no such field"),
    (["arguments", 0], {"map": 0, "scalar": "SeqQ"}, "launch.arguments[0]", "expected one of tensor"),
    (["arguments", 0], {"scalar": "SeqQ", "type": "i64"}, "launch.arguments[0].type", "no type of a scalar argument"),
    ([*STRUCT, 1], {"workspace": True}, "launch.arguments[3].struct[1]", "no workspace"),
    ([*STRUCT, 3], {"scalar": "SeqZ"}, "launch.arguments[3].struct[3].scalar", "SeqQ"),
    (
        [*STRUCT, 3],
        {"value": ["*", "scale", 2], "type": "i32"},
        "launch.arguments[3].struct[3].value[1]",
        "a scalar of this call",
    ),
    ([*STRUCT, 3], {"value": 1, "type": "f64"}, "launch.arguments[3].struct[3].type", "i32, i64, f32"),
    ([*STRUCT, 3], {"tensor": "O", "stride": 4}, "launch.arguments[3].struct[3].stride", "from 0 to 3"),
    ([*STRUCT, 3], {"struct": []}, "launch.arguments[3].struct[3]", "struct"),
    (["arguments", 3], {"struct": [{"tensor": "O"}]}, "launch.arguments", "LSE is used nowhere"),
    (["aligned_16"], ["P"], "launch.aligned_16[0]", "expected one of Q"),
    (["positive"], ["alpha"], "launch.positive[0]", "expected one of scale"),
]


@pytest.mark.parametrize(("path", "value", "where", "said"), WRONG_CUDA)
def test_each_wrong_field_of_a_cuda_description_is_one_problem(path, value, where, said):
    found = read(changed(CUDA, path, value), "sm_90a")
    assert isinstance(found, NotALaunch)
    assert [(p.path, said in p.message) for p in found.problems] == [(where, True)], str(found)


def test_all_wrong_fields_are_told_at_once():
    found = read(changed(changed(CUDA, ["block"], 0), ["grid"], 7) | {"entry": "1"}, "sm_90a")
    assert [p.path for p in found.problems] == ["launch.entry", "launch.grid", "launch.block"]


def test_older_cards_have_neither_clusters_nor_maps():
    found = read(changed(CUDA, ["shared_bytes"], 0), "sm_80")
    assert [p.path for p in found.problems] == ["launch.cluster", "launch.tensor_maps"], str(found)


def test_a_promise_that_the_spec_breaks_is_a_problem():
    found = read(CPU, "cpu-avx512", dataclasses.replace(SPEC, softmax_scale=-1.0))
    assert isinstance(found, NotALaunch) and "scale: the program promises a positive number" in str(found)


def test_rules_bring_their_own_names():
    spec = AttentionSpec(8, 2, 128, 128, 2, 300, 500, "bf16", (Rule.make("window", left=9, right=0),), (Rule.make("alibi"),))
    plain = CPU | {"tensors": [*CPU["tensors"], "Slopes"], "scalars": ["WindowLeft", "SeqQ", "scale"]}
    launch = read(plain, "cpu-avx512", spec)
    assert isinstance(launch, Launch), str(launch)
    assert bind(launch, spec).values["WindowLeft"] == 9 and launch.tensors[-1].axes + launch.tensors[-1].offset_axes == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "one JSON object"),
        ("{", "one JSON object"),
        ("[1]", "expected an object"),
        ('{"entry": "a", "entry": "b"}', "stands twice"),
        ('{"entry": NaN}', "no JSON number"),
        ("[" * 20_000, "levels deep"),
        ("9" * 10_000, "JSON"),
        (" " * (MAX_TEXT + 1), "characters"),
        ('{"entry": "\ud800"}', "the name of a function"),
    ],
)
def test_what_is_no_description_is_one_problem(text, said):
    found = read(text, "sm_90a")
    assert isinstance(found, NotALaunch) and said in str(found)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["Q", "O", "SeqQ", "*", "map"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*CUDA, "map", "tensor", "value", "struct"]), inner)
    ),
    max_leaves=12,
)


@given(st.sampled_from(sorted(CUDA)), JSON, st.sampled_from(["sm_90a", "cpu-avx512"]))
def test_no_value_of_a_field_raises(name, value, target):
    assert isinstance(read(json.dumps(CUDA | {name: value}), target), (Launch, NotALaunch))
