"""The search of an author that writes device code, or translates its own programs, driven by answers written for the test."""

import asyncio

from generator.authors.clients import ScriptedClient
from generator.authors.direct_prompts import DirectPrompts
from generator.authors.exchange import Answer, Sampling
from generator.authors.llm import LanguageModelAuthor, Search
from generator.authors.prompting import TaskPrompts
from generator.feedback import Feedback

TL = TaskPrompts("SYSTEM", "FIRST", "SKETCH", "CODE", "tl", 10_000)
SOURCE = DirectPrompts("HOW", "TASK", "", "", "cpp", 10_000, translation="TRANSLATE $PROGRAM END")


def tl(name):
    return f"```tl\nKernel {name}\n```"


def source(name):
    return f'```cpp\nint {name}();\n```\n```launch\n{{"entry": "{name}"}}\n```'


def run(answers, verdicts, prompts, style, translation=None, **search):
    """The outcome, and every last message asked. verdicts: name -> seconds, "checked", or what was wrong."""
    asked, queue = [], list(answers)

    async def answer(request):
        asked.append((request.messages[0].content, request.messages[-1].content))
        return Answer(queue.pop(0), "stop", 10, 5, False, "m", 1.0)

    async def evaluate(proposal):
        said = verdicts[proposal.text.split()[1].rstrip("();")]
        if said == "checked":
            return Feedback("checked", "right", data={"program": f"{proposal.text.strip()}, filled"})
        return Feedback("measured", f"{said} s", said) if isinstance(said, float) else Feedback("compile_failed", said)

    sampling, searched = Sampling("m", max_tokens=100), Search(**{"improvements": 0} | search)
    author = LanguageModelAuthor(ScriptedClient(answer), sampling, prompts, style, searched, translation=translation)
    return asyncio.run(author.run(evaluate)), asked


def test_source_is_mended_and_made_faster_with_its_launch():
    answers = [source("bad"), source("slow"), source("quick")]
    outcome, asked = run(answers, {"bad": "line 3", "slow": 2.0, "quick": 1.0}, SOURCE, "direct", improvements=1)
    assert asked[0] == ("HOW", "TASK") and "> line 3" in asked[1][1] and "one tagged `launch`" in asked[1][1]
    assert "int slow();" in asked[2][1] and '"entry": "slow"' in asked[2][1], "the program to beat, and how it is launched"
    assert [j.proposal.kind for j in outcome.judged] == ["source"] * 3
    assert outcome.best.proposal.launch == '{"entry": "quick"}\n' and outcome.best.proposal.author == "llm-direct:m"


def test_a_right_program_is_translated_by_the_model():
    answers = [tl("wrong"), tl("good"), source("bad"), source("slow"), source("quick")]
    verdicts = {"wrong": "no", "good": "checked", "bad": "line 1", "slow": 2.0, "quick": 1.0}
    outcome, asked = run(answers, verdicts, TL, "one_pass", SOURCE, improvements=1)
    assert [said for _, said in asked][2] == "TRANSLATE Kernel good, filled END"
    assert [system for system, _ in asked] == ["SYSTEM", "SYSTEM", "HOW", "HOW", "HOW"]
    wrong, good, bad, slow, quick = (j.proposal for j in outcome.judged)
    assert (good.parent, bad.parent, slow.parent, quick.parent) == (wrong.hash, good.hash, bad.hash, slow.hash)
    assert [p.kind for p in (good, bad, slow, quick)] == ["tl", "source", "source", "source"]
    assert bad.program == slow.program == quick.program == "Kernel good, filled"
    assert outcome.best.proposal is quick and quick.author == "llm:m"


def test_a_program_that_stays_wrong_is_not_translated():
    outcome, asked = run([tl("wrong")] * 2, {"wrong": "no"}, TL, "one_pass", SOURCE, repairs=1)
    assert len(asked) == 2 and outcome.best is None


def test_samples_are_told_apart():
    outcome, _ = run([source("a"), source("b")], {"a": 1.0, "b": "no"}, SOURCE, "direct", samples=2, repairs=0)
    assert {j.proposal.launch: j.sample for j in outcome.judged} == {'{"entry": "a"}\n': 0, '{"entry": "b"}\n': 1}
