"""Queries all replicas of a plane and merges their answers. Each replica holds some partitions.

Theory of operation. A query goes to the smallest set of replicas that together hold all partitions, this one first. Each
answer lists the partitions that it covers. A partition that a replica has released, or whose replica does not answer, is
requested from the next replica that announces it. Only one replica at a time is queried for a partition, and each engine is in
one partition, so no match occurs twice. The answer names the partitions that no replica covers.

The engines of other replicas, for listings and candidates, are refreshed every few seconds. Their trust is part of each
answer. If the engines of an answer are newer than the last refresh, they are refreshed first.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvevents.client.reasons import Reason
from kvevents.plane.replicas import ShardAnnouncement, plan_queries
from kvevents.service.errors import NotFoundError
from kvevents.service.member import Member, MemberMatch
from kvevents.service.peers import Peers, PeerUnavailableError
from kvevents.service.registration import Key, Scope
from kvevents.service.scope_fields import scope_of
from kvevents.service.shard_server import (
    Expectation,
    ExpectationAnswer,
    MemberDescription,
    MemberList,
    PartitionQuery,
    Rows,
    ShardAnswer,
    ShardQuery,
    ShardServer,
)
from kvevents.stream import Trust, TrustState

log = logging.getLogger(__name__)

MAX_ROUNDS: Final = 4
"""Most rounds of asking further replicas for one query."""
MAX_EXPECTATIONS: Final = 256
"""Most expectations that are being sent to other replicas. Further ones are dropped, since they are hints."""
MAX_INLINE_TOKENS: Final = 1 << 16
"""Most tokens of a query that is encoded and looked up in the event loop. Longer ones use a thread."""
ORIGIN: Final = "shard"
"""Origin of the engines of other replicas."""


class MergedMatches(NamedTuple):
    """The merged answer of all replicas."""

    rows: list[list[MemberMatch]]
    """Matches by prompt."""
    missing: str
    """Why the answer does not cover the whole fleet; empty if it does."""


class _Known(NamedTuple):
    """The partitions of another replica whose members this one knows, and the version of the members."""

    version: str
    partitions: set[int]


class _Asking:
    """The partial answer to one query."""

    def __init__(self, count: int, partitions: set[int]) -> None:
        self.rows: Rows = [[] for _ in range(count)]
        self.left: Final = partitions
        """Partitions without an answer so far."""
        self.refused: Final[dict[str, set[int]]] = {}
        """Partitions, by replica, for which the replica was queried without an answer."""
        self.known = False
        """Whether any replica serves the model."""
        self.unknown: NotFoundError | None = None

    def take(self, partitions: Collection[int], rows: Rows) -> None:
        """Add the answer of this replica for some partitions."""
        for merged, found in zip(self.rows, rows, strict=True):
            merged.extend(found)
        self.known = True
        self.left.difference_update(partitions)


class RemoteMember(Member):
    """An engine of another replica, as that replica describes it."""

    __slots__ = ("description", "partition")

    def __init__(self, description: MemberDescription, partition: int, now: float) -> None:
        super().__init__(description.registration, ORIGIN, now)
        self.partition = partition
        self.update_description(description, now)

    def update_description(self, description: MemberDescription, now: float) -> None:
        """Store the newest description."""
        self.description = description
        self.is_hidden = description.is_hidden
        trust = description.view.trust
        self.set_trust(Trust(trust.state, trust.reason, trust.attested), trust.reason_codes, now)

    def admits(self, scope: Scope) -> bool:
        """See `Member`. Only the digest of the salt is known here."""
        return super().admits(scope) and self.description.salt_digest in {None, scope.salt_digest}

    def store_trust(self, state: str, reason: str, reason_codes: tuple[Reason, ...], now: float) -> TrustState | None:
        """Set the trust of the engine. Return the former state if it has changed."""
        return self.set_trust(Trust(state, reason), reason_codes, now)

    @property
    def block_sizes(self) -> list[int]:
        """See `Member`."""
        return self.description.view.block_sizes

    @property
    def tiers(self) -> dict[str, int]:
        """See `Member`."""
        return self.description.view.tiers

    @property
    def blocks(self) -> int:
        """See `Member`."""
        return self.description.view.blocks

    def view(self) -> Any:
        """See `Member`."""
        return msgspec.structs.replace(self.description.view, trust=self.trust_status, since=self.since)


class ScatterGather:
    """Answers queries for all partitions, with the help of the other replicas. Use it in one event loop.

    `present` returns the announcements of the other replicas. `in_thread` calls a function in another thread, for long prompts.
    """

    def __init__(
        self,
        name: str,
        url: str,
        answering: ShardServer,
        peers: Peers,
        present: Callable[[], Mapping[str, ShardAnnouncement]],
        in_thread: Callable[..., Awaitable[Any]],
    ) -> None:
        self.answering: Final = answering
        self.peers: Final = peers
        self.version = 0
        """Changes when an engine of another replica is added or removed, or changes its state."""
        self.incomplete = 0
        """Number of answers that did not cover the whole fleet."""
        self._name: Final = name
        self._url: Final = url
        self._present: Final = present
        self._in_thread: Final = in_thread
        self._members: dict[Key, RemoteMember] = {}
        self._known: dict[str, _Known] = {}
        """Known members by replica."""
        self._refreshing: dict[str, asyncio.Task[set[int]]] = {}
        self._expecting: set[asyncio.Task[None]] = set()

    # --- engines of other replicas

    @property
    def members(self) -> dict[Key, RemoteMember]:
        """The engines of partitions that other replicas serve."""
        served = self.answering.served()
        return {key: member for key, member in list(self._members.items()) if member.partition not in served}

    @property
    def uncovered_partitions(self) -> list[int]:
        """Partitions that no replica announces."""
        layout = self.answering.layout()
        held = set(self.answering.served()).union(*(each.held for each in self._present().values()))
        return [partition for partition in range(layout.partitions if layout is not None else 0) if partition not in held]

    @property
    def urls(self) -> list[str]:
        """URLs of this replica and of the others."""
        return [self._url, *(each.url for each in self._present().values())]

    def holder(self, member: Member) -> str:
        """Return the URL of another replica that holds an engine; empty if none announces it."""
        partition = self.answering.partition_of(member)
        return next((each.url for each in self._present().values() if partition in each.held), "")

    def block_sizes(self, scope: Scope) -> list[int]:
        """Return the tokens per block of the engines in a scope, the smallest first."""
        return sorted(
            {size for each in self._members.values() if each.registration.scope[:3] == scope[:3] for size in each.block_sizes}
        )

    @property
    def replicas(self) -> int:
        """Number of other replicas that announce themselves."""
        return len(self._present())

    async def run(self) -> None:
        """Refresh the engines of other replicas until cancelled."""
        try:
            while True:
                await self.refresh()
                await asyncio.sleep(self.peers.settings.pace.refresh_seconds)
        finally:
            for task in [*self._expecting, *self._refreshing.values()]:
                task.cancel()
            await self.peers.close()

    async def refresh(self) -> None:
        """Request the engines of all other replicas once."""
        layout = self.answering.layout()
        if layout is None:
            return
        left = set(range(layout.partitions)) - self.answering.served()
        for _ in range(MAX_ROUNDS):
            queries, _ = plan_queries(self._name, left, self._holding(self._present(), {}, failed=False))
            reached = await asyncio.gather(*(self._refresh(name, partitions) for name, partitions in queries.items()))
            left -= set().union(*reached)
            if all(reached):
                break
        self._mark_stale(left)  # others stay, since an answer about them may be outstanding

    def _mark_stale(self, partitions: Collection[int]) -> None:
        """Set the engines in these partitions to STALE, because no replica answers for them."""
        now = time.time()
        for member in list(self._members.values()):
            if member.partition in partitions:
                self.version += 1
                member.store_trust("STALE", f"no replica answers for partition {member.partition}", (Reason.NO_REPLICA,), now)

    async def _refresh(self, name: str, partitions: Iterable[int]) -> set[int]:
        """Refresh the engines in some partitions of one replica. Return the partitions for which it answered."""
        announced = self._present().get(name)
        if announced is None:
            return set()
        try:
            answer = await self.peers.ask(
                name, announced.url, "/v1/shard/members", PartitionQuery(partitions=sorted(partitions)), MemberList
            )
        except PeerUnavailableError as error:
            log.debug("%s", error)
            return set()
        now = time.time()
        came: set[Key] = set()
        for each in answer.members:
            key = each.registration.key
            came.add(key)
            known = self._members.get(key)
            if known is not None and known.registration == each.registration:
                known.update_description(each, now)
            else:
                self._members[key] = RemoteMember(each, self._partition_of(key), now)
            if (load := each.view.load) is not None:
                self.answering.fleet.loads.requests.report(*key, load.running + load.waiting, load.age_seconds)
        for key in [key for key, member in self._members.items() if member.partition in answer.partitions and key not in came]:
            del self._members[key]
        before = self._known.get(name)
        same = before is not None and before.version == answer.version
        self._known[name] = _Known(
            answer.version, {*answer.partitions, *(before.partitions if same and before is not None else ())}
        )
        self.version += 1
        return set(answer.partitions)

    def _partition_of(self, key: Key) -> int:
        layout = self.answering.layout()
        return -1 if layout is None else layout.partition_of(key[0])

    # --- queries

    async def find(self, question: ShardQuery, prompts: Sequence[Any]) -> MergedMatches:
        """Return the matches of prompts, and of the keys of the query, in all partitions.

        Raises `NotFoundError` for a model that no engine serves.
        """
        layout = self.answering.layout()
        if layout is None:
            self.incomplete += 1
            return MergedMatches([[] for _ in range(len(prompts) + len(question.keys))], "the plane is not known yet")
        run = self._in_thread if sum(map(len, prompts)) > MAX_INLINE_TOKENS else _call_inline
        whole = msgspec.structs.replace(question, prompts=await run(_pack_prompts, prompts))
        asking = _Asking(len(prompts) + len(question.keys), set(range(layout.partitions)))
        own: Collection[int] = self.answering.served()
        for _ in range(MAX_ROUNDS):
            try:
                rows: Rows = await run(self.answering.rows, question, own, list(prompts))
            except NotFoundError as error:
                asking.unknown = error
                asking.left.difference_update(own)
            else:
                still = self.answering.served().intersection(own)  # a partition may have been released meanwhile
                asking.take(still, [[row for row in each if self.answering.partition_of(row.member) in still] for each in rows])
            if not asking.left or not await self._ask_others(whole, asking):
                break
            own = asking.left & self.answering.served()  # partitions that this replica serves meanwhile
        if asking.left:
            self.incomplete += 1
            self._mark_stale(asking.left)
        elif not asking.known and asking.unknown is not None:
            raise asking.unknown
        return MergedMatches(asking.rows, _missing_text(sorted(asking.left)))

    async def _ask_others(self, question: ShardQuery, asking: _Asking) -> bool:
        """Query other replicas for the partitions that are left. Return False if no replica holds any of them."""
        present = self._present()
        queries, unassigned = plan_queries(self._name, asking.left, self._holding(present, asking.refused, failed=False))
        if unassigned:
            queries |= plan_queries(
                self._name, unassigned, self._holding(present, asking.refused, failed=True, except_for=queries)
            )[0]
        parts = await asyncio.gather(
            *(self._ask(name, present[name].url, question, partitions) for name, partitions in queries.items())
        )
        for (name, partitions), part in zip(queries.items(), parts, strict=True):
            answered = set() if part is None else await self._known_of(name, part, partitions)
            asking.refused.setdefault(name, set()).update(set(partitions) - answered)
            if part is not None:
                asking.known = asking.known or part.known
                asking.left.difference_update(answered)
                self._merge(asking.rows, part, answered)
        return bool(queries)

    def _holding(
        self,
        present: Mapping[str, ShardAnnouncement],
        refused: Mapping[str, set[int]],
        *,
        failed: bool,
        except_for: Iterable[str] = (),
    ) -> dict[str, set[int]]:
        """Return the announced partitions by replica: of replicas that failed recently, or of the others."""
        return {
            name: set(each.held) - refused.get(name, set())
            for name, each in present.items()
            if self.peers.has_failed(name) is failed and name not in except_for
        }

    async def _ask(self, name: str, url: str, question: ShardQuery, partitions: list[int]) -> ShardAnswer | None:
        try:
            part = await self.peers.ask(
                name, url, "/v1/shard/match", msgspec.structs.replace(question, partitions=partitions), ShardAnswer
            )
        except PeerUnavailableError as error:
            log.debug("%s", error)
            return None
        return part if len(part.found) == len(question.prompts) + len(question.keys) else None

    async def _known_of(self, name: str, part: ShardAnswer, partitions: Iterable[int]) -> set[int]:
        """Return the partitions of an answer whose engines are known. Refresh them first if the answer is newer."""
        answered = set(part.partitions).intersection(partitions)
        if self._is_known_version(name, part):
            return answered
        if (task := self._refreshing.get(name)) is not None:  # a refresh is already running
            await asyncio.shield(task)
        if self._is_known_version(name, part):
            return answered
        known = self._known.get(name)
        task = asyncio.create_task(self._refresh(name, {*part.partitions, *(known.partitions if known is not None else ())}))
        self._refreshing[name] = task
        task.add_done_callback(lambda done: self._refreshing.pop(name) if self._refreshing.get(name) is done else None)
        # A partition that was released in between is requested from its new holder.
        return answered & await asyncio.shield(task)

    def _is_known_version(self, name: str, part: ShardAnswer) -> bool:
        known = self._known.get(name)
        return known is not None and known.version == part.version and known.partitions.issuperset(part.partitions)

    def _merge(self, rows: Rows, part: ShardAnswer, answered: set[int]) -> None:
        now = time.time()
        for merged, found in zip(rows, part.found, strict=True):
            for each in found:
                member = self._members.get((each.name, each.rank))
                if member is not None and member.partition in answered:  # otherwise it was removed meanwhile
                    trust = Trust(each.state, each.reason, each.attested)
                    if member.set_trust(trust, each.reason_codes, now) is not None:
                        self.version += 1
                    held = (each.gpu, each.cpu, each.disk, each.tokens)
                    merged.append(MemberMatch(member, *held, each.certain, each.is_certain))

    # --- expectations

    def expect(self, expectation: Expectation) -> None:
        """Send an expectation to the replicas that hold the engine, without waiting for an answer."""
        if len(self._expecting) >= MAX_EXPECTATIONS:
            return
        partition = next(
            (
                member.partition
                for member in self._members.values()
                if (member.registration.instance, member.registration.rank) == (expectation.instance, expectation.rank)
                and member.admits(scope_of(expectation))
            ),
            None,
        )
        for name, announced in self._present().items():
            if partition in announced.held:
                task = asyncio.create_task(self._expect(name, announced.url, expectation))
                self._expecting.add(task)
                task.add_done_callback(self._expecting.discard)

    async def _expect(self, name: str, url: str, expectation: Expectation) -> None:
        try:
            await self.peers.ask(name, url, "/v1/shard/expect", expectation, ExpectationAnswer)
        except PeerUnavailableError as error:
            log.debug("an expectation was not sent: %s", error)


async def _call_inline(call: Callable[..., Any], *given: Any) -> Any:
    return call(*given)


def _pack_prompts(prompts: Sequence[Any]) -> list[bytes]:
    return [packed(tokens) for tokens in prompts]


def packed(tokens: Any) -> bytes:
    """Encode token ids as 32-bit little-endian numbers. Raises `OverflowError` and `TypeError` for invalid ones."""
    if isinstance(tokens, memoryview) and tokens.format == "I":
        return tokens.tobytes()
    numbers = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
    if sys.byteorder == "big":
        numbers = array("I", numbers)
        numbers.byteswap()
    return numbers.tobytes()


def _missing_text(missing: list[int]) -> str:
    if not missing:
        return ""
    partitions = ", ".join(map(str, missing))
    which = "partition" if len(missing) == 1 else "partitions"
    return f"no replica answers for {which} {partitions}: the engines in it are missing here"
