"""Who proposes programs in a sweep: the rule author, or a language model with its client, transcripts and ledger."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Protocol

from catalog import store as catalog_store
from catalog.locations import Location
from catalog.snapshot import TRANSCRIPTS
from catalog.writing import state_folder
from farm.console import InputError
from farm.history import History
from farm.jobs import Shop
from farm.model_search import ModelSearch
from farm.model_settings import ModelSettings, read_settings
from farm.plan import Plan
from farm.rows import artifacts_at
from farm.search import Attempt, RuleSearch, Versions
from generator.authors.clients import ModelClient, OpenAIClient, RecordedClient
from generator.authors.endpoint import KEY_VARIABLE, Endpoint
from generator.authors.shared_transcripts import SharedTranscripts
from generator.authors.transcripts import TranscriptStore
from generator.spec import AttentionSpec


class Author(Protocol):
    """Solves one problem by attempts; sees their rows. width: problems worth having open at a time, 0: as the executor likes."""

    @property
    def width(self) -> int: ...

    def line(self) -> str:
        """What it is waiting for and what it has cost, for the display; "" where there is nothing to say."""
        ...

    def solve(self, spec: AttentionSpec, target: str, attempt: Attempt) -> Awaitable[None]: ...


#: Gives the author of a run, as `author_of` does.
AuthorOf = Callable[..., contextlib.AbstractAsyncContextManager[Author]]


def endpoint_of(plan: Plan) -> Endpoint | None:
    """Where the plan's model is asked; None where none is. The key leaves the environment: no child of ours has a use for it.

    Raises InputError for options that no author can use, before anything is started.
    """
    settings = model_settings(plan)
    endpoint = None if settings is None or settings.replay else settings.endpoint()
    os.environ.pop(KEY_VARIABLE, None)
    return endpoint


def model_settings(plan: Plan) -> ModelSettings | None:
    """The plan's settings of a language model; None for the rule author. Raises InputError."""
    if plan.author == "rules":
        options = dict(plan.author_options)
        if named := [f"--{name}" for name in ("style", "translator") if options.get(name)]:
            raise InputError(named[0], "says how a language model is asked; expected --author llm with it, found the rule author")
        return None
    return read_settings(plan.author, dict(plan.author_options), plan.budget, plan.prices)


@contextlib.asynccontextmanager
async def author_of(
    plan: Plan, shop: Shop, versions: Versions, endpoint: Endpoint | None, note: Callable[[str], None]
) -> AsyncIterator[Author]:
    """The plan's author, its connections open until the sweep ends. `endpoint` is `endpoint_of(plan)`."""
    settings = model_settings(plan)
    if settings is None:
        yield RuleSearch(plan, versions, history=History(catalog_store.open(shop.catalog)))
        return
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(_transcripts(Location.of(shop.catalog)))
        if endpoint is None:
            client: ModelClient = RecordedClient(store)
        else:
            client = await stack.enter_async_context(OpenAIClient(endpoint, store, note))
        yield ModelSearch(plan, versions, settings, client, store, artifacts_at(shop.catalog), settings.ledger(), note)


@contextlib.contextmanager
def _transcripts(location: Location) -> Iterator[TranscriptStore]:
    """Beside the rows, and for a catalog that lies elsewhere on this machine's disk as well, as its journals do."""
    if location.local is not None:
        yield TranscriptStore(location.local / TRANSCRIPTS)
        return
    with contextlib.closing(SharedTranscripts(state_folder(location, TRANSCRIPTS), location, TRANSCRIPTS)) as store:
        store.catch_up()
        yield store
