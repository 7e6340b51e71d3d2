"""How a language model is asked in a sweep: from the plan's `author_options`, the flags and the environment. Asks nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from farm.console import InputError
from farm.fields import did_you_mean
from farm.plan import Budget
from generator.authors import ledger as ledgers
from generator.authors.endpoint import KEY_VARIABLE, Endpoint, check_url
from generator.authors.exchange import Sampling
from generator.authors.llm import Search, Style


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Every field may stand under `author_options` in a plan. The key never does: OPENAI_API_KEY alone holds it."""

    model: str
    base_url: str | None = None
    style: str = "two_stage"
    translator: str = "ours"
    max_tokens: int = 8192
    token_limit: int = 32768
    temperature: float | None = None
    seed: int | None = 0
    samples: int = 1
    repairs: int = 4
    beam: int = 1
    improvements: int = 2
    min_gain: float = 0.02
    patience: int = 1
    concurrency: int = 16
    timeout_s: float = 600.0
    tries: int = 5
    seed_with_rules: bool = False
    replay: bool = False
    _: dataclasses.KW_ONLY
    budget: Budget = field(default_factory=Budget)
    prices: tuple[tuple[str, ledgers.Price], ...] = ()

    def sampling(self) -> Sampling:
        return Sampling(self.model, self.max_tokens, self.temperature, self.seed, self.token_limit)

    def search(self) -> Search:
        return Search(self.samples, self.repairs, self.beam, self.improvements, self.min_gain, self.patience)

    def ledger(self) -> ledgers.Ledger:
        """A ledger with the plan's budget and prices."""
        return ledgers.Ledger(ledgers.Allowance(self.budget.usd, self.budget.tokens, self.budget.gpu_s), dict(self.prices))

    def endpoint(self) -> Endpoint:
        """Raises InputError where neither a key nor a URL is known."""
        try:
            return Endpoint.from_environment(
                self.base_url, timeout_s=self.timeout_s, concurrency=self.concurrency, tries=self.tries
            )
        except ValueError as error:
            raise InputError("--base-url", str(error)) from None


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,), "str | None": (str, type(None)), "int": (int,), "int | None": (int, type(None)), "bool": (bool,),
    "float": (int, float), "float | None": (int, float, type(None)),
}  # fmt: skip
STYLES: tuple[Style, ...] = ("two_stage", "one_pass", "direct")
TRANSLATORS = ("ours", "llm")
_LEAST: dict[str, float] = {
    "max_tokens": 1, "token_limit": 1024, "samples": 1, "repairs": 0, "beam": 1, "improvements": 0, "patience": 1,
    "concurrency": 1, "tries": 1, "timeout_s": 0, "min_gain": 0,
}  # fmt: skip


def read_settings(
    author: str, options: Mapping[str, Any], budget: Budget, prices: tuple[tuple[str, ledgers.Price], ...] = ()
) -> ModelSettings:
    """Checked settings. Raises InputError naming the field, what is allowed and what was found."""
    fields = {f.name: f for f in dataclasses.fields(ModelSettings) if f.name not in ("budget", "prices")}
    for name, value in options.items():
        if "key" in name.lower():
            raise InputError(f"author_options.{name}", f"a plan holds no key; set {KEY_VARIABLE} in the environment")
        if name not in fields:
            raise InputError(f"author_options.{name}", f"expected one of {', '.join(fields)}{did_you_mean(name, tuple(fields))}")
        _check(name, value, str(fields[name].type))
    if not options.get("model"):
        raise InputError(
            "--model", f"the {author} author needs a model's name: --model NAME, or author_options.model in the plan"
        )
    settings = ModelSettings(**options, budget=budget, prices=prices)
    if budget.usd is not None and settings.model not in dict(prices):
        known = ", ".join(name for name, _ in prices) or "none"
        cure = f"add `prices: {{{settings.model}: {{in: ..., out: ...}}}}` to the plan, US dollars for a million tokens"
        raise InputError("--budget-usd", f"no price is known for {settings.model} (the plan's prices: {known}); {cure}")
    if settings.translator not in TRANSLATORS:
        raise InputError("--translator", f"expected one of {', '.join(TRANSLATORS)}, found {settings.translator!r}")
    if settings.seed_with_rules and (author == "llm-direct" or settings.style == "direct"):
        raise InputError("author_options.seed_with_rules", "expected false for an author that writes device code, not TL")
    if settings.base_url:
        _check_url(settings.base_url)
    if settings.style not in STYLES:
        raise InputError("author_options.style", f"expected one of {', '.join(STYLES)}, found {settings.style!r}")
    if author == "llm-direct" and (named := [name for name in ("style", "translator") if name in options]):
        found = f"found {options[named[0]]!r} with the llm-direct author, which writes device code itself: leave it out"
        raise InputError(f"--{named[0]}", f"says how an author of TL goes about it; {found}, or take --author llm")
    if settings.max_tokens >= settings.token_limit:
        found = f"{settings.max_tokens} of {settings.token_limit}"
        raise InputError("author_options.max_tokens", f"expected less than token_limit, found {found}")
    return dataclasses.replace(settings, style="direct") if author == "llm-direct" else settings


def _check_url(url: str) -> None:
    try:
        check_url(url)
    except ValueError as error:
        raise InputError("--base-url", str(error)) from None


def _check(name: str, value: Any, kind: str) -> None:
    allowed = _TYPES[kind]
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        words = " or ".join("nothing" if t is type(None) else t.__name__ for t in allowed)
        raise InputError(f"author_options.{name}", f"expected {words}, found {value!r}")
    least = _LEAST.get(name)
    if least is not None and isinstance(value, int | float) and not value >= least:
        raise InputError(f"author_options.{name}", f"expected at least {least}, found {value!r}")
