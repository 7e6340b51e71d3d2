"""The CUDA translator's texts and schedules: golden records, refusals, every statement counts. Compiles nothing."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from generator.authors.rules import RuleAuthor
from generator.canonical import to_plain
from generator.spec import AttentionSpec, Rule
from generator.targets import TARGETS
from generator.tl.checker import check
from generator.tl.ir import Constant, Hint, Program
from generator.tl.parser import parse, parse_or_raise
from generator.tl.printer import print_program
from generator.translate import translate
from generator.translate.records import Translated, Untranslatable, launch_from_plain
from verifier.cuda_arguments import unaligned_entry

PROGRAMS = Path(__file__).parents[1] / "programs" / "valid"
GOLDEN = Path(__file__).parent / "golden_cuda"
CUDA = ("sm_75", "sm_80", "sm_90a")
SMALL = {"BM": 64, "BN": 32, "D": 64, "DV": 64}
TILES = {"sm_75": {"BM": 64, "BN": 32}, "sm_80": {"BM": 128, "BN": 64}, "sm_90a": {"BM": 128, "BN": 128}}


def source(name: str, target: str, **constants: int) -> str:
    text = (PROGRAMS / f"{name}.tl").read_text()
    text = text.replace("bf16", "f16") if target == "sm_75" else text
    for constant, value in constants.items():
        text = re.sub(rf"\b{constant} = \d+", f"{constant} = {value}", text, count=1)
    return text


def translated(text: str | Program, target: str) -> Translated:
    program = parse_or_raise(text) if isinstance(text, str) else text
    out = translate(program, TARGETS[target])
    assert isinstance(out, Translated), out
    return out


def authored(spec: AttentionSpec, target: str, m: int = 64, n: int = 32) -> Program:
    program = RuleAuthor().code(spec, target)
    tiles = {"BM": m, "BN": n}
    body = tuple(Constant(s.name, (tiles.get(s.name, s.choices[0]),)) if isinstance(s, Constant) else s for s in program.body)
    return Program(program.name, program.stage, body)


@pytest.mark.parametrize("target", CUDA)
@pytest.mark.parametrize("name", ["attention", "variant", "two_pass", "sigmoid", "gemm"])
def test_schedules_are_as_recorded(name: str, target: str, request: pytest.FixtureRequest) -> None:
    """The decisions, not the text: ranges, groups, rings, notes. To accept new ones: delete the file and run again."""
    out = translated(source(name, target, **TILES[target]), target)
    facts = {k: v for k, v in out.launch.target_facts.items() if k != "parameters"}
    facts["unaligned"] = {k: v for k, v in facts["unaligned"].items() if k != "parameters"}
    found = json.loads(json.dumps({"schedule": out.schedule, "facts": facts}))
    path = GOLDEN / f"{name}.{target}.json"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
        pytest.fail(f"{path.name} was missing and has been written: look at it, then add it")
    assert found == json.loads(path.read_text())


def test_same_text_for_programs_that_print_the_same() -> None:
    program = parse_or_raise(source("attention", "sm_80"))
    again = parse_or_raise(print_program(program))
    assert translated(program, "sm_80").source == translated(again, "sm_80").source


def test_launches_survive_json() -> None:
    launch = translated(source("attention", "sm_90a"), "sm_90a").launch
    assert launch_from_plain(json.loads(json.dumps(to_plain(launch)))) == launch


def test_parameter_blocks_are_packed_by_alignment() -> None:
    for target in CUDA:
        launch = translated(source("variant", target, **TILES[target]), target).launch
        second = unaligned_entry(launch)
        assert second is not None
        sizes = {"tensor_map": 128, "pointer": 8, "i64": 8, "i32": 4, "f32": 4}
        for facts in (launch.target_facts["parameters"], second.target_facts["parameters"]):
            end = 0
            for field in facts["fields"]:
                assert field["offset"] >= end and field["offset"] % min(64, sizes[field["type"]]) == 0
                end = field["offset"] + sizes[field["type"]]
            assert end <= facts["bytes"] < end + facts["alignment"]


def test_bf16_is_refused_on_turing() -> None:
    out = translate(parse_or_raise((PROGRAMS / "attention.tl").read_text()), TARGETS["sm_75"])
    assert isinstance(out, Untranslatable) and out.reason == "unsupported_dtype" and "bf16" in out.message and out.line > 0


@pytest.mark.parametrize("target", CUDA)
def test_fp32_products_are_refused(target: str) -> None:
    out = translate(authored(AttentionSpec(2, 2, 64, 64, 1, 64, 64, "fp32"), target), TARGETS[target])
    assert isinstance(out, Untranslatable) and out.reason == "unsupported_dtype" and "f32" in out.message


@pytest.mark.parametrize("target", CUDA)
def test_tiles_that_do_not_fit_say_so(target: str) -> None:
    text = source("attention", target, BM=128, BN=256, D=256, DV=256)
    out = translate(parse_or_raise(text), TARGETS[target])
    assert isinstance(out, Untranslatable) and out.reason == "does_not_fit" and "shared memory" in out.message


def test_warps_that_cannot_share_the_rows_are_refused() -> None:
    program = parse_or_raise(source("attention", "sm_80"))
    hinted = dataclasses.replace(program, body=(Hint("warps", "3"), *program.body))
    out = translate(hinted, TARGETS["sm_80"])
    assert isinstance(out, Untranslatable) and "warps" in out.message


def test_names_of_the_program_never_meet_the_runtime() -> None:
    """Tiles and arguments called like functions of the runtime and variables of the emitted code."""
    text = (
        source("attention", "sm_80")
        .replace("row_max", "lane")
        .replace("corr", "fetch")
        .replace("scale", "smem")
        .replace("base", "t")
    )
    assert "t_lane" in translated(text, "sm_80").source and "p.a_smem" in translated(text, "sm_80").source


def test_sm_90a_falls_back_to_mma_with_a_reason() -> None:
    small = translated(source("attention", "sm_90a", BM=32, BN=32), "sm_90a")
    assert small.launch.target_facts["family"] == "mma.sync"
    assert small.schedule["notes"] == ["no wgmma: a block of 32 rows is not 64, 128, 192, 256 or 384"]
    assert translated(source("attention", "sm_90a"), "sm_90a").launch.target_facts["family"] == "wgmma"


@pytest.mark.parametrize(
    ("m", "n", "hints", "order", "slots"),
    [
        (128, 48, {}, "rotated", 2),  # 200 registers of tiles and operands
        (128, 64, {}, "program", 1),  # 224: would spill
        (128, 64, {"rotate": "on"}, "rotated", 1),  # K in one slot: two blocks have to fit a multiprocessor
        (128, 48, {"rotate": "off"}, "program", 1),
        (256, 64, {}, "turns", 2),
        (256, 64, {"stages": "3"}, "turns", 3),
        (256, 64, {"pingpong": "off"}, "program", 1),
        (256, 112, {}, "program", 1),  # two slots of it are more than a block has
    ],
)
def test_loops_overlap_where_it_fits(m: int, n: int, hints: dict[str, str], order: str, slots: int) -> None:
    program = authored(AttentionSpec(4, 2, 128, 128, 1, 512, 512, "bf16"), "sm_80", m, n)
    out = translated(Program(program.name, program.stage, (*(Hint(k, v) for k, v in hints.items()), *program.body)), "sm_80")
    assert (out.schedule["orders"], out.schedule["slots"]["K"]) == ([order], slots)
    assert ("bar_sync(1, THREADS);" in out.source) == (order == "turns")


def test_warps_pass_over_tiles_only_where_both_ends_move() -> None:
    for name, passes in (("window", True), ("causal", False), ("prefix", False), ("document", False)):
        rule = Rule.make(name, **{"window": {"left": 99}, "prefix": {"length": 50}}.get(name, {}))
        spec = AttentionSpec(4, 2, 64, 64, 1, 512, 512, "bf16", (rule,))
        assert ("own0.has(" in translated(authored(spec, "sm_80", 128, 128), "sm_80").source) == passes, name


def test_sources_need_no_header() -> None:
    for target in CUDA:
        assert "#include" not in translated(source("attention", target, **TILES[target]), target).source


RULES = {
    "full": ((), ()),
    "window": ((Rule.make("window", left=9, right=2),), ()),
    "sink_window": ((Rule.make("sink_window", sink=2, left=8),), (Rule.make("sink_logit"),)),
    "prefix": ((Rule.make("prefix", length=7),), (Rule.make("alibi"),)),
    "document": ((Rule.make("document"), Rule.make("causal", align="top_left")), (Rule.make("softcap", cap=9.0),)),
    "padding": ((Rule.make("padding"),), ()),
}


@pytest.mark.parametrize("target", CUDA)
@pytest.mark.parametrize("rules", RULES)
def test_every_rule_of_the_author_translates(rules: str, target: str) -> None:
    masks, scores = RULES[rules]
    for d, dv in ((40, 40), (192, 128)):
        spec = AttentionSpec(4, 2, d, dv, 1, 100, 100, "fp16", masks, scores)
        out = translated(authored(spec, target), target)
        assert out.schedule["loops"][0]["covered"], out.schedule
        assert out.launch.target_facts["family"] == ("wgmma" if target == "sm_90a" else "mma.sync")
        decode = dataclasses.replace(spec, phase="decode", seqlen_q=1)
        assert translated(authored(decode, target, m=16), target).launch.target_facts["family"] == "mma.sync"


def deletions(text: str) -> list[tuple[str, str]]:
    """(line, text without it) for every line that may be deleted alone."""
    lines = text.splitlines()
    out = []
    for i, line in enumerate(lines):
        if re.match(r"\s*(Copy|Compute|Reshape|Let|Allocate|Grid|Argument)\b", line):
            out.append((line, "\n".join(lines[:i] + lines[i + 1 :])))
    return out


@pytest.mark.parametrize("target", CUDA)
@pytest.mark.parametrize("name", ["attention", "sigmoid", "gemm"])
def test_every_statement_counts(name: str, target: str) -> None:
    """Without any one statement the checker refuses the program, or the text changes."""
    text = source(name, target, **(SMALL if name != "gemm" else {"BM": 64, "BN": 64, "BK": 64}))
    whole = translated(text, target).source
    for line, shorter in deletions(text):
        parsed = parse(shorter)
        if parsed.program is None or any(d.severity == "error" for d in check(parsed.program)):
            continue
        out = translate(parsed.program, TARGETS[target])
        for part in (_first, _second):
            assert isinstance(out, Untranslatable) or part(out.source) != part(whole), f"no effect: {line}"


def _first(text: str) -> str:
    """The kernel and its parameters, without comments, which quote the program."""
    return re.sub(r"//[^\n]*", "", text[: text.index("__unaligned(")])


def _second(text: str) -> str:
    """The second entry point and its parameters, without comments."""
    block = re.search(r"struct Params(?:Unaligned)? \{[^}]*\};", text[text.rindex("struct Params") :])
    assert block
    return block[0] + re.sub(r"//[^\n]*", "", text[text.index("__unaligned(") :])


RESPONSES = Path(__file__).parents[1] / "responses"
ANSWERS = sorted(p.name.removesuffix(".answer.md") for p in RESPONSES.glob("*.answer.md") if "```tl" in p.read_text())


@pytest.mark.parametrize("target", CUDA)
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_of_a_model_translate(name: str, target: str) -> None:
    """As a model wrote them; their 128 x 128 tiles are too large for two of the targets, so those get smaller ones."""
    match = re.search(r"```tl\n(.*?)```", (RESPONSES / f"{name}.answer.md").read_text(), re.DOTALL)
    assert match
    text = match[1].replace("bf16", "f16") if target == "sm_75" else match[1]
    for constant, value in ({} if target == "sm_90a" else {"BM": 64, "BN": 32}).items():
        text = re.sub(rf"\b{constant} = \d+", f"{constant} = {value}", text, count=1)
    out = translated(text, target)
    (loop,) = out.schedule["loops"]
    assert loop["covered"] and loop["schedule"] == "rotated" and len(loop["split"]) == len(loop["masks"])
    assert out.schedule["notes"] == []
