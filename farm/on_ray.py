"""How a sweep gets its executor: Ray on this machine, a cluster that is joined, or none. Plans nothing and runs no job itself."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farm.executors import Executor, LocalExecutor, NoExecutor, run_stages, stages_of
from farm.guardian import Guardian
from farm.jobs import STAGES, Job, Row, Shop
from farm.places import Place, places_of
from verifier.environment import cores_given

if TYPE_CHECKING:
    from farm.preflight import Preflight
    from farm.ray_executor import RayExecutor

#: A socket's path has at most 107 characters; Ray adds up to 68.
LONGEST_PLACE = 20
#: Tries to start Ray on this machine.
STARTS = 2


@dataclass(frozen=True, slots=True)
class Options:
    """How to run a plan here: where rows go and on what the work runs."""

    catalog: str
    executor: str = "ray"
    address: str = "local"
    quiet: bool = False
    stages: str = STAGES
    allow_missing: bool = False
    sanitize: bool = False

    @property
    def on_cluster(self) -> bool:
        return self.executor == "ray" and self.address != "local"


def executor_for(options: Options, shop: Shop, targets: tuple[str, ...], run_id: str, checked: Preflight | None) -> Executor:
    """The executor that the options ask for. checked: what the look at the cluster found."""
    if options.executor == "local":
        return LocalExecutor(shop)
    return OnRay(options, shop, targets, run_id, checked.unmet if checked else {})


class OnRay:
    """Ray, started with the first job: a sweep on this machine that finds everything done starts nothing."""

    def __init__(self, options: Options, shop: Shop, targets: tuple[str, ...], run_id: str, unmet: dict[str, str]) -> None:
        self._options, self._shop, self._targets, self._run_id, self._unmet = options, shop, targets, run_id, unmet
        self._running: tuple[Guardian, RayExecutor] | None = None
        self.before_start: Callable[[], None] = lambda: None
        self.after_start: Callable[[], None] = lambda: None

    @property
    def capacity(self) -> int:
        return self._running[1].capacity if self._running else 2 * cores_given() + 3

    @property
    def settled(self) -> bool:
        """On this machine its devices are known before Ray runs."""
        return self._options.address == "local" or self._started().settled

    def places(self, targets: tuple[str, ...]) -> tuple[Place, ...]:
        if self._options.address == "local":
            return places_of(targets, stages_of(self._shop).devices())
        return self._started().places(targets)

    def room(self, place: Place) -> int:
        return self._running[1].room(place) if self._running else self.capacity

    def submit(self, job: Job) -> Future[Row]:
        """A job that brings its own end needs no worker, only its row."""
        if job.trouble is None:
            return self._started().submit(job)
        ended: Future[Row] = Future()
        ended.set_result(run_stages(job, self._shop))
        return ended

    def state(self) -> dict[str, Any]:
        return self._running[1].state() if self._running else {}

    def close(self) -> None:
        """Ends everything that was started for this sweep, and waits until it is gone."""
        if self._running is None:
            return
        guardian, executor = self._running
        try:
            executor.close()
            executor.end_session()
        finally:
            guardian.close()

    def _started(self) -> RayExecutor:
        if self._running is None:
            self.before_start()
            try:
                self._running = self._start()
            finally:
                self.after_start()
        return self._running[1]

    def _start(self) -> tuple[Guardian, RayExecutor]:
        if self._options.address == "local":
            return self._start_here()
        from farm import session
        from farm.ray_executor import RayExecutor

        guardian = Guardian(self._run_id)
        try:
            session.start_session(self._options.address, 0)
            return guardian, RayExecutor(self._shop, targets=self._targets, unmet=self._unmet)
        except BaseException:
            guardian.close()
            raise

    def _start_here(self) -> tuple[Guardian, RayExecutor]:
        """On this machine. Raises NoExecutor: Ray gives up after 30 s, which is not enough where much else runs."""
        from farm import session
        from farm.nodes import local_wishes
        from farm.ray_executor import RayExecutor

        wishes = local_wishes(self._targets, stages_of(self._shop).devices())
        held = sum(int(dict(wish.options)["num_cpus"]) for wish in wishes)  # by devices' actors, which mostly wait
        why = ""
        for _ in range(STARTS):
            guardian = Guardian(self._run_id)
            try:
                session.start_session("local", cores_given() + held, _watched_folder(guardian, self._run_id))
                return guardian, RayExecutor(self._shop, wishes, cores_given())
            except Exception as error:
                why = " ".join(str(error).split())[:200] or type(error).__name__
                session.stop_session()
                guardian.close()
            except BaseException:
                session.abandon()  # half of it is there
                guardian.close()
                raise
        raise NoExecutor(f"Ray did not start in {STARTS} tries ({why}); a machine that is less busy, or --executor local, does")


def _watched_folder(guardian: Guardian, run_id: str) -> str:
    """A new folder for all files of a session, known to the guardian before Ray's first process starts; of Ray's own choice one
    hears only afterwards. Its name is short, since the paths of Ray's sockets must be.
    """
    place = tempfile.gettempdir() if len(tempfile.gettempdir()) <= LONGEST_PLACE else "/tmp"
    folder = f"{place}/farm-{run_id.rpartition('-')[2]}"
    guardian.watch_folder(folder)
    os.mkdir(folder, 0o700)
    return folder
