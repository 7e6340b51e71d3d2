"""Who proposes programs in a sweep: the rule author, or a language model with its client, transcripts and ledger."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol

from catalog.locations import Location
from farm.jobs import Shop
from farm.model_search import ModelSearch
from farm.model_settings import ModelSettings, read_settings
from farm.plan import Plan
from farm.rows import artifacts_at
from farm.search import Attempt, RuleSearch, Versions
from generator.authors.clients import OpenAIClient, RecordedClient
from generator.authors.transcripts import TranscriptStore
from generator.spec import AttentionSpec


class Author(Protocol):
    """Solves one problem by attempts; sees their rows."""

    def solve(self, spec: AttentionSpec, target: str, attempt: Attempt) -> Awaitable[None]: ...


def check_author(plan: Plan) -> None:
    """Raises InputError for options that no author can use, before anything is started."""
    settings = model_settings(plan)
    if settings is not None and not settings.replay:
        settings.endpoint()


def model_settings(plan: Plan) -> ModelSettings | None:
    """The plan's settings of a language model; None for the rule author."""
    return None if plan.author == "rules" else read_settings(plan.author, dict(plan.author_options), plan.budget)


@contextlib.asynccontextmanager
async def author_of(plan: Plan, shop: Shop, versions: Versions, note: Callable[[str], None]) -> AsyncIterator[Author]:
    """The plan's author, its connections open until the sweep ends."""
    settings = model_settings(plan)
    if settings is None:
        yield RuleSearch(plan, versions)
        return
    store = TranscriptStore(transcripts_folder(shop))
    async with contextlib.AsyncExitStack() as stack:
        client = RecordedClient(store) if settings.replay else OpenAIClient(settings.endpoint(), store)
        if isinstance(client, OpenAIClient):
            await stack.enter_async_context(client)
        ledger = settings.ledger(perhaps_paid=store.unanswered())
        yield ModelSearch(plan, versions, settings, client, store, artifacts_at(shop.catalog), ledger, note)


def transcripts_folder(shop: Shop) -> Path:
    """Beside the rows of a local catalog, else in this machine's cache."""
    return (Location.of(shop.catalog).local or Path(shop.cache)) / "transcripts"
