"""The author of a sweep on a cluster: an actor on its driver's node. What its driver has in its place is `farm.far_author`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from farm.actors import end_with_head, pack, unpack
from farm.author_desk import Desk, FromAuthor, Report
from farm.authors import Author, AuthorOf, author_of
from farm.far_author import ANSWER_S, FarAuthor, answer_of
from farm.jobs import Shop
from farm.model_search import ModelSearch
from farm.plan import Plan
from farm.search import Versions
from farm.session import kill, on_node, own_node, ray
from farm.variants import load_variants
from generator.authors.endpoint import Endpoint
from generator.authors.ledger import Paid

POLL_S = 1.0  # an author with nothing to say answers after so long, with its line for the display
SETTLE_S = 0.02  # that letters from an author wait for others


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class AuthorActor:
    """Solves problems; needs the network where a language model is asked, and a CPU now and then."""

    async def open(
        self, name: str, plan: Plan, shop: Shop, versions: Versions, endpoint: Endpoint | None, paid: Paid, authors: AuthorOf
    ) -> int:
        """Its width (`farm.authors.Author`). paid: by authors of this run that were lost."""
        self._watch = end_with_head(shop)
        if plan.variants:
            load_variants(plan.variants)
        self._desk, self._held, self._waiting = Desk(name), contextlib.AsyncExitStack(), asyncio.ensure_future(_nothing())
        self._author: Author = await self._held.enter_async_context(authors(plan, shop, versions, endpoint, self._desk.note))
        if isinstance(self._author, ModelSearch):
            self._author.ledger.take_over(paid)
        return self._author.width

    async def exchange(self, letters: bytes) -> bytes:
        """Takes letters; gives a report with those that there are, as soon as there are any, both packed. A call that comes
        meanwhile ends the older one.
        """
        self._waiting.cancel()
        self._desk.take(unpack(letters), self._author)
        mine = self._waiting = asyncio.ensure_future(self._desk.collected(POLL_S, SETTLE_S))
        await asyncio.wait({mine})
        return self._report(() if mine.cancelled() else mine.result())

    async def close(self) -> bytes:
        """Ends every search and every connection."""
        await self._desk.close()
        await self._held.aclose()
        return self._report(())

    def _report(self, letters: tuple[FromAuthor, ...]) -> bytes:
        paid = self._author.ledger.news() if isinstance(self._author, ModelSearch) else Paid()
        return pack(Report(letters, self._author.line(), paid))


async def _nothing() -> tuple[FromAuthor, ...]:
    return ()


@contextlib.asynccontextmanager
async def author_on_ray(
    plan: Plan,
    shop: Shop,
    versions: Versions,
    endpoint: Endpoint | None,
    note: Callable[[str], None],
    authors: AuthorOf = author_of,
) -> AsyncIterator[Author]:
    """The plan's author as an actor of the cluster that this process has joined, on the driver's node as long as there is one.

    The key of a model's endpoint goes to it in a call, and stands in no record of the cluster's.
    """
    home = on_node(own_node(), soft=True)

    async def opened(name: str, paid: Paid) -> tuple[Any, int]:
        actor = AuthorActor.options(scheduling_strategy=home).remote()
        ref = actor.open.remote(name, plan, shop, versions, endpoint, paid, authors)
        return actor, await asyncio.wait_for(answer_of(ref), ANSWER_S)

    far = FarAuthor(opened, note, kill)
    await far.start()
    talking = asyncio.ensure_future(far.talk())
    try:
        yield far
    finally:
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)
        await far.close()
