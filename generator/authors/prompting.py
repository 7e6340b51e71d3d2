"""Prompts as text files filled from the same tables that the tools use. Asks nobody and knows no answer.

The pieces lie in `prompts/`; `task_prompts` puts them together for one spec, target and style, within a token limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from string import Template

from generator.authors.answers import estimate_tokens
from generator.authors.describe import declarations, functions, operators, task_in_words
from generator.authors.exchange import Message
from generator.authors.proposal import Proposal
from generator.feedback import Feedback
from generator.spec import AttentionSpec
from generator.tl.grammar import FORMS
from generator.tl.ir import DTYPES

#: Share of the limit that one feedback text may take; compilers and checkers can say more than a prompt has room for.
MAX_FEEDBACK_SHARE = 0.25
#: A model's old answer that cannot keep so many tokens is not worth repeating to it.
LEAST_ANSWER_TOKENS = 256
CUT = "\n[... {count:,} characters left out here to fit the token limit ...]\n"


class PromptTooLong(ValueError):
    """The parts of a prompt that cannot be cut do not fit the token limit."""


@dataclass(frozen=True, slots=True)
class TaskPrompts:
    """Every text that a model is sent for one task. `tag` is the fence of the program asked for."""

    system: str
    first: str
    sketch: str
    code: str
    tag: str
    token_limit: int

    def code_after(self, found: str) -> str:
        """The question for the code of a sketch in which the checker found errors; as for any other where it found none."""
        return fill("code_mended.md", feedback=self._quoted(found)) if found else self.code

    def repair(self, feedback: Feedback) -> str:
        """What was found, quoted and cut to its share of the limit."""
        name = "repair.md" if self.tag == "tl" else "repair_source.md"
        return fill(name, feedback=self._quoted(feedback.text), tag=self.tag)

    def improve(self, proposal: Proposal, feedback: Feedback) -> str:
        launch = "" if self.tag == "tl" else ", and its launch description in one tagged `launch`"
        program = proposal.text.rstrip("\n")
        if proposal.launch:
            program += f"\n```\n\n```launch\n{proposal.launch.rstrip()}"
        return fill("improve.md", program=program, feedback=self._quoted(feedback.text), tag=self.tag, launch_too=launch)

    def _quoted(self, text: str) -> str:
        """Behind `> ` on every line: text that came from programs and compilers must not look like ours."""
        shortened = cut_middle(text, int(self.token_limit * MAX_FEEDBACK_SHARE))
        return "\n".join("> " + line for line in shortened.splitlines())


def load(name: str) -> str:
    """The text of a prompt file."""
    return resources.files("generator.authors").joinpath("prompts", name).read_text()


def fill(name: str, **values: str) -> str:
    """A prompt file with every `$name` replaced; a missing value is a bug and raises KeyError."""
    return Template(load(name)).substitute(values).rstrip("\n")


def cut_middle(text: str, max_tokens: int) -> str:
    """The text, or its beginning and end with the number of characters left out said between them."""
    if estimate_tokens(text) <= max_tokens:
        return text
    keep = max(0, max_tokens * 3 - 200)
    head = text.encode("utf-8", "replace")[: keep * 2 // 3].decode("utf-8", "ignore")
    tail = text.encode("utf-8", "replace")[len(text.encode("utf-8", "replace")) - keep // 3 :].decode("utf-8", "ignore")
    return head + CUT.format(count=len(text) - len(head) - len(tail)) + tail


def fit_messages(messages: Sequence[Message], token_limit: int) -> tuple[Message, ...]:
    """The messages within a limit of estimated tokens: model's old answers are cut in the middle, the rest is kept whole.

    Raises PromptTooLong, with both numbers, where that is not enough.
    """
    sizes = [estimate_tokens(m.content) for m in messages]
    over = sum(sizes) - token_limit
    if over <= 0:
        return tuple(messages)
    fixed = sum(size for m, size in zip(messages, sizes, strict=True) if m.role != "assistant")
    answers = sum(sizes) - fixed
    room = token_limit - fixed
    if room < min(answers, LEAST_ANSWER_TOKENS):
        raise PromptTooLong(f"the prompt needs about {fixed:,} tokens of {token_limit:,}: raise token_limit or lower max_tokens")
    share = room / answers if answers else 1.0
    return tuple(
        Message(m.role, cut_middle(m.content, int(size * share))) if m.role == "assistant" else m
        for m, size in zip(messages, sizes, strict=True)
    )


def language_page() -> str:
    """The language on a page, from the parser's own tables."""
    return fill(
        "language.md",
        forms="\n".join(f"- `{form}`" for form in FORMS.values()),
        scalar_dtypes="i32 or f32",
        dtypes=", ".join(DTYPES),
        operators=operators(),
        functions=functions(),
    )


def example() -> str:
    """A program that every prompt shows: a plain matrix product, never an attention."""
    return fill("example_gemm.md", program=load("example_gemm.tl").rstrip("\n"))


def task_prompts(spec: AttentionSpec, target_title: str, target_facts: str, token_limit: int) -> TaskPrompts:
    """The prompts of TL generation for one spec. Raises PromptTooLong where even the task does not fit the limit."""
    system = fill("system.md", target_title=target_title, language=language_page() + "\n\n" + example())
    task = fill("task.md", task=task_in_words(spec), declarations=declarations(spec), facts=target_facts)
    prompts = TaskPrompts(
        system, fill("one_pass.md", task=task), fill("sketch.md", task=task), load("code.md").rstrip(), "tl", token_limit
    )
    fit_messages((Message("system", system), Message("user", prompts.first)), token_limit)
    return prompts
