"""Bodies and prompts between replicas: foreign partitions are not read, and long prompts do not delay other clients."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvevents.client.schemas import MAX_MEDIA, MatchRequest
from kvevents.service.errors import ConflictError, ServiceError, TooMuchError
from kvevents.service.http import v1
from kvevents.service.http.messages import Body, Headers, HttpRequest
from kvevents.service.http.routes import ROUTES
from kvevents.service.http.thread_pools import MATCHING, ThreadPools
from kvevents.service.member import Member, MemberMatch
from kvevents.service.scatter_gather import MAX_INLINE_TOKENS, ScatterGather
from kvevents.service.settings import Limits, ServiceSettings
from kvevents.service.shard_server import Expectation, ExpectationAnswer, PartitionQuery, ShardQuery

LIMIT = 10_000
LIMITS = Limits(max_json_bytes=LIMIT)


class ShardServer:
    """A fake that accepts every query."""

    def part(self, query: ShardQuery) -> Any:
        return len(query.prompts)

    def members(self, query: PartitionQuery) -> Any:
        return len(query.partitions)

    def expect(self, _asked: Expectation) -> ExpectationAnswer:
        return ExpectationAnswer(known=True)


def service(*, shards: bool = True) -> Any:
    return SimpleNamespace(
        shards=SimpleNamespace(answering=ShardServer()) if shards else None,
        config=ServiceSettings(limits=LIMITS),
        check_tokens=lambda _count: None,
    )


def request(path: str, body: bytes, kind: bytes = b"application/msgpack") -> HttpRequest:
    return HttpRequest("POST", path, b"", Headers([(b"content-type", kind)]), body)


def query(path: str, body: dict[str, Any], codec: Any = msgspec.msgpack, *, shards: bool = True) -> bytes:
    kind = b"application/msgpack" if codec is msgspec.msgpack else b"application/json"
    handler: Any = ROUTES[path]["POST"].handler
    response = handler(service(shards=shards), request(path, codec.encode(body), kind))
    return bytes(response.body)


@pytest.mark.parametrize("handler", [v1.shard_match, v1.shard_members, v1.shard_expect])
def test_a_service_without_partitions_reads_no_body(handler: Any) -> None:
    with pytest.raises(ConflictError):
        handler(service(shards=False), request("/v1/shard/match", b"\xc1" * 5))


@pytest.mark.parametrize("codec", [msgspec.msgpack, msgspec.json])
def test_prompts_have_their_own_limit_and_everything_else_has_the_usual_one(codec: Any) -> None:
    prompt = b"\0" * 2 * LIMIT
    assert query("/v1/shard/match", {"model": "m", "prompts": [prompt, prompt]}, codec) == b"2"
    expected = {"model": "m", "instance": "e", "rank": 0, "prompt": prompt, "seconds": 1}
    assert query("/v1/shard/expect", expected, codec) == b'{"known":true}'
    keys = {"model": "m", "prompts": [prompt], "keys": [list(range(LIMIT))]}
    for path, body in (
        ("/v1/shard/match", keys),
        ("/v1/shard/expect", {**expected, "mm": [{"id": "x", "start": 0, "length": 1}] * LIMIT}),
        ("/v1/shard/members", {"partitions": [1] * 2 * LIMIT}),
    ):
        with pytest.raises(TooMuchError):
            query(path, body, codec)


def test_the_numbers_of_partitions_and_media_items_are_limited() -> None:
    assert query("/v1/shard/members", {"partitions": list(range(256))}) == b"256"
    for path in ("/v1/shard/members", "/v1/shard/match"):
        with pytest.raises(ServiceError, match="length <= 256"):
            query(path, {"model": "m", "partitions": [1] * 257})
    media = [{"id": "x", "start": 0, "length": 1}] * (MAX_MEDIA + 1)
    body = msgspec.msgpack.encode({"model": "m", "tokens": [], "mm": media})
    with pytest.raises(ServiceError, match=f"length <= {MAX_MEDIA}"):
        Body.of(MatchRequest).read(request("/v1/match", body), Limits())


def test_expecting_a_prompt_runs_in_a_thread_pool() -> None:
    assert ROUTES["/v1/shard/expect"]["POST"].pool == MATCHING


class Share:
    """A fake with partitions 0 and 1 of a plane of two; it calls `on_rows` while prompts are looked up."""

    def __init__(self, on_rows: Any) -> None:
        self.partitions = frozenset({0, 1})
        self._on_rows = on_rows
        self.threads: list[str] = []

    def layout(self) -> Any:
        return SimpleNamespace(partitions=2)

    def served(self) -> frozenset[int]:
        return self.partitions

    def partition_of(self, member: Any) -> int:
        return int(member.partition)

    def rows(self, _question: ShardQuery, partitions: Any, prompts: list[Any]) -> Any:
        self.threads.append(threading.current_thread().name)
        found = [
            [MemberMatch(cast("Member", SimpleNamespace(partition=number)), 16, 0, 0, 16) for number in sorted(partitions)]
            for _ in prompts
        ]
        self._on_rows(self)
        return found


def release(share: Share) -> None:
    share.partitions = frozenset({0})


@pytest.mark.parametrize(
    ("tokens", "thread"), [(MAX_INLINE_TOKENS, "MainThread"), (MAX_INLINE_TOKENS + 1, "kvevents-matching_0")]
)
async def test_only_long_prompts_are_looked_up_in_a_thread(tokens: int, thread: str) -> None:
    """Rows of a partition that is released during the lookup are dropped, because another replica has it now."""
    for on_rows, partitions, missing in ((lambda _: None, [0, 1], ""), (release, [0], "no replica answers for partition 1")):
        share = Share(on_rows)
        peers: Any = SimpleNamespace(has_failed=lambda _: False)
        scatter_gather = ScatterGather("a", "http://a", share, peers, dict, ThreadPools(1)[MATCHING].run)  # type: ignore[arg-type]
        found = await scatter_gather.find(ShardQuery(model="m"), [[1] * tokens])
        assert share.threads == [thread]
        assert [row.member.partition for row in found.rows[0]] == partitions  # type: ignore[attr-defined]
        assert found.missing.startswith(missing)
        assert bool(found.missing) is bool(missing)
