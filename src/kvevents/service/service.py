"""The service as a whole: fleet, index source, persistence, readiness, and the data that endpoints return."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from kvevents.client.schemas import HealthAnswer, ReadyAnswer, StatsAnswer
from kvevents.errors import SnapshotError
from kvevents.index import Block, PrefixIndex
from kvevents.package_metadata import VERSION
from kvevents.service.access import AuditLog, read_tokens
from kvevents.service.allow_list import EndpointAllowList
from kvevents.service.block_listings import BlockListings
from kvevents.service.certificates import CertificateFiles
from kvevents.service.data_plane import DataPlane
from kvevents.service.discovery.files import read_sources
from kvevents.service.discovery.runner import EngineDiscovery
from kvevents.service.fleet.fleet import TOPIC_ORIGIN, Fleet
from kvevents.service.fleet.member import Member
from kvevents.service.fleet.registration import NAME_SEPARATOR, StreamKey
from kvevents.service.http.thread_pools import BoundedLock, thread_pools
from kvevents.service.index_source import FollowedEngines, IndexSource, OpenIndexSource
from kvevents.service.prober import Prober
from kvevents.service.registrations import Registrations
from kvevents.service.selection_cache import SelectionCache
from kvevents.service.settings import ServiceSettings
from kvevents.service.state_store import StateStore
from kvevents.stream import Checkpoint

log = logging.getLogger(__name__)

CLAIM_SECONDS: Final = 120.0
"""Seconds after the start at which restored blocks are removed if their stream has not been registered again."""
REFRESH_SECONDS: Final = 0.25
"""Pause in seconds between two updates of the answers to probes."""
CHECKPOINTS_SECONDS: Final = 10.0
"""Maximum seconds for which a snapshot waits until the follower's thread returns the checkpoints of the streams."""


class Service:
    """The service without its HTTP server. Call `start` and then `stop`, each one time, in one event loop."""

    snapshot_at: float | None = None
    limit_warning = ""
    """A sentence about `max_clients` if it was lowered, because the process cannot open so many files; else empty."""
    is_ending = False
    """Whether the process is ending. The service then answers requests, but reports that it is not ready."""

    def __init__(
        self,
        config: ServiceSettings,
        sources_file: Path | None = None,
        open_source: OpenIndexSource | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = config
        self.tokens = read_tokens(config.access)
        self.audit = AuditLog()
        self.allow_list = EndpointAllowList(config.allow)
        self.state_store = StateStore(Path(config.state_dir)) if config.state_dir is not None else None
        self.fleet = Fleet(
            PrefixIndex(memory_limit=config.memory_limit),
            max_sources=config.limits.max_sources,
            max_reservations=config.limits.max_reservations,
            hide_stale_seconds=config.hide_stale_seconds,
            curve=config.curve,
            load=config.load,
        )
        self.fleet.why_incomplete = self._why_incomplete
        self.pools = thread_pools(config.limits.max_waiting)
        self.dump_lock = BoundedLock("dump", config.limits.max_waiting)
        """Lock that allows one client at a time to read `/dump`."""
        self.ignored_fields = Counter[str]()
        """Maps a path to the number of unknown fields that were ignored in its request bodies."""
        self.block_listings = BlockListings(config.limits.max_listed_blocks, config.limits.listing_seconds)
        self.data_plane = DataPlane(self.fleet, self.health, self.readiness)
        self.selections = SelectionCache()
        self._certificates = None if config.tls is None else CertificateFiles(config.tls, self.data_plane.reload_tls)
        self.restore_faults: list[str] = []
        """Sentences about saved state that could not be restored."""
        self._save_faults: dict[str, str] = {}
        """Why the newest write of `snapshot` or `registrations` has failed; empty if the write succeeded."""
        self._checkpoints: dict[StreamKey, Checkpoint] = {}
        external = None if open_source is None else open_source(self.fleet)
        self._discovery = EngineDiscovery(config, sources_file, self.fleet, self._resume, config.limits.max_sources)
        self.registrations = Registrations(
            fleet=self.fleet,
            allow_list=self.allow_list,
            store=self.state_store,
            audit=self.audit,
            advice="" if external is None else external.registration_advice,
            owner_of=self._owner_of,
            resume=self._resume,
            report_fault=partial(self._report_fault, "registrations"),
        )
        """The registrations by clients."""
        prober = Prober(self.fleet, self.allow_list, config.probe)
        self.index_source: IndexSource = external or FollowedEngines(self._discovery, self.registrations, prober)
        self._tasks: list[asyncio.Task[None]] = []
        self._clock = clock
        self._began = clock()
        self._is_ready = False
        self._expects_engines = _names_engines(config, sources_file)

    @property
    def index(self) -> PrefixIndex:
        """The index from which queries are answered."""
        return self.fleet.index

    # --- start and stop

    async def start(self) -> None:
        """Restore the saved state, and start to follow the engines."""
        self._restore()
        self.fleet.follower.start()
        self.registrations.restore(self._report_lost)
        if (topics := self.settings.topics) is not None:
            await asyncio.wrap_future(self.fleet.follow_topics(topics.source(self.settings.curve), topics.registration_of))
        work = [self._refresh_data_plane(), self.index_source.run()]
        if self._certificates is not None:
            work.append(self._certificates.watch())
        if self.state_store is not None:
            work += [self._save_regularly(), self._remove_unclaimed()]
        self._tasks = [asyncio.create_task(coroutine) for coroutine in work]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)
        for sentence in self.warnings():
            if sentence not in self.restore_faults:  # `_report_lost` has already logged these sentences.
                log.warning("%s", sentence)

    async def _refresh_data_plane(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            self.data_plane.refresh()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """If a task ended with an error, log the error and mark the service as failed: such an error is a defect."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a task of the service has failed; restart the service", exc_info=error)
            self.fleet.failure = f"{type(error).__name__}: {error}"
            self.data_plane.publish()

    async def stop(self) -> None:
        """Save the state, and stop all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.save)
        await self.registrations.save()
        await asyncio.to_thread(self.fleet.follower.stop)
        await asyncio.to_thread(self.fleet.loads.close)
        if self.state_store is not None:
            self.state_store.close()

    def _restore(self) -> None:
        if self.state_store is None:
            return
        try:
            self._checkpoints = self.state_store.restore(self.index)
        except SnapshotError as error:
            self._report_lost(f"{error}; the service starts with an empty index and fills it from the streams")
        # A stream without a checkpoint is followed from its beginning.
        infos = self.index.workers()
        carried = {(info.source, rank) for info in infos for rank in info.carried_ranks}
        for key in {(info.source, info.rank) for info in infos} - carried - self._checkpoints.keys():
            self.index.remove_worker(key)
        if self._checkpoints:
            log.info("restored %d blocks of %d streams", self.index.stats().blocks, len(self._checkpoints))

    def _owner_of(self, key: StreamKey) -> str | None:
        """Return the name of the topic endpoint or provider that has found a rank; None if a client has registered the rank."""
        member, topics = self.fleet.members.get(key), self.settings.topics
        is_by_topic = member is not None and member.origin == TOPIC_ORIGIN and topics is not None
        return f"its topic at {topics.endpoint}" if is_by_topic and topics else self._discovery.owner_of(key)

    def _resume(self, key: StreamKey) -> Checkpoint | None:
        return self._checkpoints.pop(key, None)

    async def _remove_unclaimed(self) -> None:
        await asyncio.sleep(CLAIM_SECONDS)
        for key in list(self._checkpoints):
            if self._checkpoints.pop(key, None) is not None:
                self.index.remove_worker(key)
                instance = key[0].split(NAME_SEPARATOR)[-1]
                log.info("%s rank %d was not registered again; its blocks are removed", instance, key[1])

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(self.settings.snapshot_seconds)
            await asyncio.to_thread(self.save)
            await self.registrations.save()

    def save(self) -> None:
        """Write a snapshot. If the write fails, `/health` shows a warning."""
        if self.state_store is None:
            return
        fault = ""
        try:
            self.snapshot_at = self.state_store.save(self.index, self._current_checkpoints)
        except (SnapshotError, TimeoutError) as error:
            fault = str(error) or f"no snapshot was written: no checkpoints of the streams within {CHECKPOINTS_SECONDS:g} s"
        self._report_fault("snapshot", fault)

    def _current_checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints of followed streams, and of restored streams that have not been registered again."""
        checkpoints = self.fleet.follower.submit(self.fleet.follower.subscriber.checkpoints).result(CHECKPOINTS_SECONDS)
        return [*checkpoints, *self._checkpoints.values()]

    def _report_lost(self, sentence: str) -> None:
        """Log that saved state is lost, and add a warning to `/health`, because clients must register engines again."""
        self.restore_faults.append(sentence)
        log.error("%s", sentence)

    def _report_fault(self, part: str, sentence: str) -> None:
        if sentence and sentence not in self._save_faults.values():
            log.error("%s", sentence)
        self._save_faults[part] = sentence

    @property
    def snapshot_fault(self) -> str | None:
        """Why the snapshot or the registrations could not be written; None if both files were written."""
        return next(filter(None, self._save_faults.values()), None)

    # --- answers

    def members(self) -> Mapping[StreamKey, Member]:
        """Return the members of the fleet, including the further ranks that the members' streams carry."""
        return dict(self.fleet.workers)

    def blocks(self, key: StreamKey) -> Iterable[Block]:
        """Return the blocks that a worker holds now, unsorted."""
        try:
            return self.index.blocks(key)
        except LookupError:  # No event of the worker has arrived yet.
            return ()

    # --- faults and state of the service

    def faults(self) -> dict[str, list[str]]:
        """Map each provider of discovery to sentences about its faults."""
        topics = list(self.fleet.topic_faults.values())
        return self._discovery.faults() | ({TOPIC_ORIGIN: topics} if topics else {})

    def warnings(self) -> list[str]:
        """Return sentences about problems that an operator should know."""
        sentences = [*self.restore_faults, *filter(None, (self.limit_warning,))]
        if self.settings.is_open:
            host = self.settings.host
            sentences.append(f"every client of {host} can query and register: set access.tokens, or listen at 127.0.0.1")
        if not self.settings.is_loopback and self.settings.access.tokens and self.settings.tls is None:
            sentences.append("tokens travel in clear: set tls")
        certificate_fault = None if self._certificates is None else self._certificates.fault
        sentences += filter(None, (self.snapshot_fault, certificate_fault))
        sentences += [*self.index_source.warnings(), *self.fleet.topic_faults.values()]
        return [*sentences, *filter(None, (self._failure,))]

    def health(self) -> HealthAnswer:
        """Return whether the service works, and its warnings."""
        return HealthAnswer(status="ok" if self.fleet.failure is None else "failed", warnings=self.warnings())

    @property
    def _failure(self) -> str:
        """Why the process must be restarted, as a sentence; empty if the process works."""
        return "" if self.fleet.failure is None else f"the service no longer receives events: {self.fleet.failure}"

    def readiness(self) -> ReadyAnswer:
        """Return whether the service is ready for queries.

        A service that was ready stays ready until it ends or fails, because trust reports later problems.
        """
        members = list(self.fleet.members.values())
        exact = sum(member.trust_status.state == "EXACT" for member in members)
        caught_up = sum(member.is_caught_up for member in members)
        missing = self._find_unmet_condition(len(members), exact, caught_up)
        is_late = self._clock() - self._began >= self.settings.ready.deadline_seconds
        reason = ""
        if not self._is_ready:
            reason = "" if self.index_source.is_partial else self._why_incomplete()
            reason = reason or ("" if is_late else missing)
            self._is_ready = not reason
        ends = "the service is ending" if self.is_ending else self._failure
        if ends:
            reason = ends
        elif not reason:
            reason = self._summarize(len(members), exact, caught_up)
            if is_late and missing:
                reason += f"; ready because {self.settings.ready.deadline_seconds:g} s have passed since the start"
        return ReadyAnswer(
            ready=self._is_ready and not ends,
            why=reason,
            exact=exact,
            sources=len(members),
            quorum=self.settings.ready.quorum,
            deadline_seconds=self.settings.ready.deadline_seconds,
        )

    def _why_incomplete(self) -> str:
        """Return why some engines, of any model, may be unknown; empty if all engines are known."""
        if reason := self.index_source.why_incomplete:
            return reason
        expects = self._expects_engines or self.registrations.were_saved or self.settings.ready.expected
        if self.settings.kubernetes and not expects:  # Expect engines until the API server has listed the pods.
            expects = not self.index_source.has_found_engines or bool(self._discovery.provider_faults())
        return "engines are expected, but no engine is registered or found yet" if expects and not self.fleet.members else ""

    def _find_unmet_condition(self, members: int, exact: int, caught_up: int) -> str:
        """Return a condition of readiness that is not met; empty if all are met. After the deadline, no condition counts."""
        if not self.index_source.has_found_engines:
            return "not every discovery provider has answered"
        if members < (count := self.settings.ready.expected):
            return f"{members} of {count} expected sources are registered"
        is_enough = caught_up >= self.settings.ready.quorum * members
        return "" if is_enough else self._summarize(members, exact, caught_up)

    def _summarize(self, members: int, exact: int, caught_up: int) -> str:
        expected = self.settings.ready.expected
        text = f"{exact} of {members} sources are EXACT"
        text += f", {caught_up - exact} wait for a live batch" if caught_up > exact else ""
        return text + (f", and {expected} were expected" if members < expected else "")

    def stats(self) -> StatsAnswer:
        """Return the response of `/v1/stats`."""
        members = list(self.fleet.members.values())
        stats, answers = self.index.stats(), self.data_plane.counts().answers
        return StatsAnswer(
            version=VERSION,
            uptime_seconds=self._clock() - self._began,
            **{name: getattr(stats, name) for name in ("workers", "blocks", "unique_blocks", "tiers", "orphans", "evicted")},
            sources=dict(Counter(member.trust_status.state for member in members)),
            index_bytes=stats.bytes,
            memory_limit=self.settings.memory_limit,
            lookups=answers.lookups,
            hits=answers.hits,
            batches=self.fleet.follower.batches,
            batches_per_second=self.fleet.follower.rate,
            snapshot_seconds=None if self.state_store is None else self.settings.snapshot_seconds,
            snapshot_at=self.snapshot_at,
            snapshot_fault=self.snapshot_fault,
        )


def _names_engines(config: ServiceSettings, sources_file: Path | None) -> bool:
    """Return whether the settings or the watched file name engines. A selector does not count: it might select no pod."""
    if config.sources or config.source_files or config.dns:
        return True
    try:
        return sources_file is not None and bool(read_sources(sources_file, keys=config.__struct_fields__))
    except ExceptionGroup:  # The provider of the file reports the fault.
        return True
