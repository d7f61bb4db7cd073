"""Sharded replicas: every response covers the whole fleet, or lists what is missing."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import msgspec
import nats
import pytest

from kvevents.plane.layout import Layout
from kvevents.plane.replicas import SHARD_PREFIX, ShardAnnouncement, assigned_replicas
from nats_servers import NatsServer, needs_nats, server_of_module  # noqa: F401 - a fixture
from plane_cases import plane_at, run_bridge
from service_cases import MODEL, Client, Engine, engines, wait_for
from service_replica_cases import watch_of
from shard_cases import PACE, Replica

pytestmark = needs_nats
PARTITIONS: Final = 16
ENGINES: Final = 6
PROMPT: Final = list(range(96))


class Plane:
    """Engines with a bridge, and the replicas that a test starts."""

    def __init__(self, server: NatsServer, name: str, stack: ExitStack) -> None:
        self.server, self.name = server, name
        self.engines: list[Engine] = stack.enter_context(engines(ENGINES))
        watches = [watch_of(f"e{at}", each) for at, each in enumerate(self.engines)]
        stack.enter_context(run_bridge(plane_at(server.url, name=name, partitions=PARTITIONS), *watches))
        self._stack = stack
        # Each engine holds a prefix of another length.
        for at, each in enumerate(self.engines):
            each.store(PROMPT[: 16 * (at + 1)])

    def start(self, *names: str, **more: Any) -> list[Replica]:
        """Start replicas at the same time, and return them when they are ready."""
        found = [Replica(self.server.url, self.name, name, **more) for name in names]
        for each in found:
            self._stack.callback(each.end)
        for each in found:
            each.wait_until_ready()
        return found

    def whole(self) -> Replica:
        """Start a replica that holds all partitions."""
        return self.start("whole", holders=None)[0]

    @staticmethod
    def is_complete(client: Client) -> bool:
        """Return whether all engines have their blocks."""
        return held(client) == {f"e{at}": 16 * (at + 1) for at in range(ENGINES)}


@contextmanager
def open_plane(server: NatsServer, name: str) -> Iterator[Plane]:
    with ExitStack() as stack:
        yield Plane(server, name, stack)


def held(client: Client) -> dict[str, int]:
    answer = client.post("/query", {"model_name": MODEL, "token_ids": PROMPT, "whole_prompt": True})
    assert answer.status == 200, answer
    assert "kvevents-missing" not in answer.headers, answer.headers
    found = answer.json["instances"].items()
    return {name: each["longest_matched"] for name, each in found if each["longest_matched"]}


def wait_for_shares(replicas: list[Replica], holders: int) -> None:
    """Wait until each replica serves exactly its share, and has the announcements of all others."""
    names = [each.name for each in replicas]
    wanted = {
        name: {partition for partition in range(PARTITIONS) if name in assigned_replicas(partition, names, holders)}
        for name in names
    }

    def are_settled() -> bool:
        return all(each.served == wanted[each.name] and read_announcements(each) == wanted for each in replicas)

    def read_announcements(replica: Replica) -> dict[str, set[int]]:
        present = replica.service.replica.present  # type: ignore[union-attr]
        others = {name: set(present[name].held) for name in names if name in present}
        return others | {replica.name: wanted[replica.name]}

    wait_for("every share", are_settled)


def test_three_sharded_replicas_answer_like_an_unsharded_one(server: NatsServer) -> None:
    """This holds for every API and for listings. Each replica holds only its share."""
    with open_plane(server, "same") as plane:
        whole = plane.whole()
        shares = plane.start("a", "b", "c")
        wait_for_shares(shares, 1)
        assert all(0 < len(each.served) < PARTITIONS for each in shares)
        assert sum(len(each.served) for each in shares) == PARTITIONS
        assert count_blocks(whole) == sum(range(1, ENGINES + 1))
        wait_for("released blocks to be dropped", lambda: sum(map(count_blocks, shares)) == count_blocks(whole))
        wait_for("members", lambda: all(read_sources(each) == read_sources(whole) for each in shares))
        for each in shares:
            for request in REQUESTS:
                # A bridge can pause for a moment, and replicas do not detect that at the same time.
                wait_for(f"the same response to {request}", lambda: post_sorted(each, *request) == post_sorted(whole, *request))  # noqa: B023
            assert each.post("/query", {"model_name": "unknown", "token_ids": PROMPT}).status == 404
            assert each.post("/query", {"model_name": MODEL, "token_ids": [-1]}).status == 422
            # The data plane answers probes from a copy that is refreshed every 0.25 s.
            wait_for("readiness", lambda: each.get("/readyz").json["sources"] == ENGINES)  # noqa: B023


def count_blocks(client: Client) -> int:
    """Return the number of blocks in the replica's own index."""
    count: int = client.get("/v1/stats").json["blocks"]
    return count


BODY: Final = {"model": MODEL, "tokens": PROMPT, "whole_prompt": True}
REQUESTS: Final[list[tuple[str, dict[str, Any]]]] = [
    ("/query", {"model_name": MODEL, "token_ids": PROMPT}),
    ("/query", {"model": MODEL, "token_ids": PROMPT}),
    ("/query", {"model_name": MODEL, "token_ids": []}),
    ("/v1/match", BODY),
    ("/v1/match", {**BODY, "lora": "adapter"}),
    ("/v1/match", {**BODY, "mm": [{"id": "image", "start": 0, "length": 4}]}),
    ("/v1/match_many", {"model": MODEL, "prompts": [PROMPT, PROMPT[:32], []]}),
    ("/v1/select", {**BODY, "explain": True, "tie": "first"}),
    ("/v1/select", {**BODY, "candidates": [{"instance": "e0"}, {"instance": "e3", "load": 1.0}], "explain": True}),
]


def post_sorted(client: Client, path: str, body: dict[str, Any]) -> Any:
    """Return a response with sorted lists and maps."""
    found = client.post(path, body)
    assert found.status == 200, (path, found)
    return sort_values(found.json)


def sort_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: sort_values(each) for key, each in sorted(value.items())}
    if isinstance(value, list):
        return sorted(map(sort_values, value), key=repr)
    return value


def read_sources(client: Client) -> list[tuple[str, str, int]]:
    return sorted(
        (each["instance"], each["trust"]["state"], each["blocks"]) for each in client.get("/v1/sources").json["sources"]
    )


def test_listings_of_sharded_replicas_contain_all_engines(server: NatsServer) -> None:
    with open_plane(server, "listings") as plane:
        whole, shares = plane.whole(), plane.start("a", "b")
        wait_for_shares(shares, 1)
        for path in ("/workers", "/services", "/global_view"):
            wait_for(path, lambda path=path: sort_values(shares[0].get(path).json) == sort_values(whole.get(path).json))  # type: ignore[misc]
        wait_for(
            "hot prefixes",
            lambda: post_sorted(shares[0], *REQUESTS[0]) and shares[0].get(f"/v1/hot?model={MODEL}").json["prefixes"],
        )
        hot = shares[0].get(f"/v1/hot?model={MODEL}").json
        assert (hot["missing"], hot["prefixes"][0]["workers"]) == ("", 1)
        foreign = next(each["instance"] for each in shares[0].get("/v1/sources").json["sources"] if each["origin"] == "plane")
        mine, other = shares if foreign in own_instances(shares[0]) else shares[::-1]
        assert mine.get(f"/v1/blocks?instance={foreign}").json["total"] > 0
        refused = other.get(f"/v1/blocks?instance={foreign}")
        assert (refused.status, refused.json["hint"]) == (409, f"send the request to {mine.url}")
        assert shares[0].get("/dump").status == 409
        dumps = [each.get("/dump?own=true").json[f"{MODEL}:default"]["events"] for each in shares]
        assert sum(map(len, dumps)) == sum(range(1, ENGINES + 1))


def own_instances(share: Replica) -> set[str]:
    return {member.registration.instance for member in list(share.service.fleet.members.values())}


def test_every_response_is_complete_while_replicas_join(server: NatsServer) -> None:
    """Partitions move while queries are sent. No response lacks an engine, or has blocks that the engine does not hold."""
    with open_plane(server, "moves") as plane:
        first, second = plane.start("a", "b")
        wait_for_shares([first, second], 1)
        with query_constantly(first) as wrong:
            (third,) = plane.start("c")
            wait_for_shares([first, second, third], 1)
            assert plane.is_complete(third)
            (fourth,) = plane.start("d")
            wait_for_shares([first, second, third, fourth], 1)
        assert wrong == []


@contextmanager
def query_constantly(share: Replica) -> Iterator[list[Any]]:
    """Send queries in a thread, and collect wrong responses."""
    wrong: list[Any] = []
    ended = threading.Event()

    def ask() -> None:
        client = Client(share.url)
        while not ended.is_set():
            answer = client.post("/v1/match", BODY)
            # If a bridge is slow, no source is EXACT, but the response must be complete and right.
            found = {each["instance"]: each["tokens"] for each in answer.json.get("workers", [])}
            if answer.json.get("missing") != "" or found != {f"e{at}": 16 * (at + 1) for at in range(ENGINES)}:
                wrong.append(answer)
        client.close()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield wrong
    finally:
        ended.set()
        thread.join()


def test_one_of_two_holders_can_end_without_effect(server: NatsServer) -> None:
    with open_plane(server, "two") as plane:
        shares = plane.start("a", "b", "c", holders=2, shard={"pace": {**PACE, "present_seconds": 8.0, "dead_seconds": 10.0}})
        wait_for_shares(shares, 2)
        with query_constantly(shares[0]) as wrong:
            shares[2].end()
            wait_for_shares(shares[:2], 2)
        assert wrong == []
        assert shares[0].served == shares[1].served == frozenset(range(PARTITIONS))


def test_partitions_without_a_holder_are_reported_until_they_have_one(server: NatsServer) -> None:
    """The body of /v1, a header of other APIs, trust and metrics report them."""
    with open_plane(server, "gone") as plane:
        shares = plane.start("a", "b", shard={"pace": {**PACE, "present_seconds": 3.0, "dead_seconds": 6.0}})
        wait_for_shares(shares, 1)
        one, two = shares
        lost = own_instances(two)
        assert lost
        wait_for("members", lambda: len(read_sources(one)) == ENGINES)
        two.end()
        answer = wait_for(
            "an incomplete response", lambda: found if (found := one.post("/v1/match", BODY).json)["missing"] else None
        )
        assert "no replica answers for partition" in answer["missing"]
        assert {each["instance"] for each in answer["workers"] if each["tokens"]} == own_instances(one)
        assert {each["trust"]["state"] for each in answer["workers"] if each["instance"] in lost} == {"STALE"}
        header = one.post("/query", {"model_name": MODEL, "token_ids": PROMPT})
        assert (header.status, "no replica answers" in header.headers["kvevents-missing"]) == (200, True)
        stale = {instance for instance, state, _ in read_sources(one) if state == "STALE"}
        assert stale <= lost
        assert 'kvevents_shard_partitions{state="uncovered"}' in one.get("/metrics").body.decode()
        wait_for("the other's partitions", lambda: one.served == frozenset(range(PARTITIONS)))
        wait_for("a complete response", lambda: plane.is_complete(one))
        assert {state for _, state, _ in read_sources(one)} == {"EXACT"}


def test_a_replica_that_never_answers_is_skipped(server: NatsServer) -> None:
    """The replica announces all partitions and accepts connections. Others with the same partitions are queried instead."""
    with open_plane(server, "mute") as plane, socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        # Partitions are assigned to it, too. The long `release_seconds` prevents that others release them to it.
        pace = {**PACE, "settle_seconds": 3.0, "release_seconds": 600.0}
        shares = plane.start("a", "b", holders=1, shard={"ask_seconds": 0.2, "pace": pace})
        wait_for_shares(shares, 1)
        ghost = ShardAnnouncement(f"http://127.0.0.1:{silent.getsockname()[1]}", 1, list(range(PARTITIONS)))
        ghosts = {f"ghost-{number}" for number in range(3)}  # one of the replicas with equal announcements is queried first
        for name in ghosts:
            announce(server, plane.name, name, ghost)
        wait_for("their announcements", lambda: ghosts <= set(shares[0].service.replica.present))  # type: ignore[union-attr]
        assert plane.is_complete(shares[0])
        assert shares[0].service.shards.peers.failures >= 1  # type: ignore[union-attr]


def test_a_replica_at_a_host_that_is_not_allowed_is_not_queried(server: NatsServer) -> None:
    """Its announcement has no effect: it gets no request and no partition, and a metric counts it."""
    with open_plane(server, "foreign") as plane, socket.create_server(("", 0), backlog=64) as foreign:
        (one,) = plane.start("a", shard={"allow": ["127.0.0.9"]})
        wait_for_shares([one], 1)
        url = f"http://127.0.0.1:{foreign.getsockname()[1]}"
        for number in range(3):
            announce(server, plane.name, f"evil-{number}", ShardAnnouncement(url, 1, list(range(PARTITIONS))))
        wait_for("the denied replicas", lambda: "kvevents_shard_denied_replicas 3" in one.get("/metrics").body.decode())
        for _ in range(20):
            assert plane.is_complete(one)
        assert one.served == frozenset(range(PARTITIONS))
        assert one.service.replica.present == {}  # type: ignore[union-attr]
        foreign.setblocking(False)
        with pytest.raises(BlockingIOError):
            foreign.accept()


def announce(server: NatsServer, plane: str, name: str, announcement: ShardAnnouncement) -> None:
    async def put() -> None:
        client = await nats.connect(server.url)
        await (await client.jetstream().key_value(Layout(plane, PARTITIONS).leases)).put(
            SHARD_PREFIX + name, announcement.encode()
        )
        await client.close()

    asyncio.run(put())


def holders(client: Client, body: dict[str, Any]) -> list[str]:
    return [each["instance"] for each in client.post("/v1/match", body).json["workers"] if each["tokens"]]


def test_an_expectation_reaches_the_holder_of_the_engine(server: NatsServer) -> None:
    with open_plane(server, "expects") as plane:
        shares = plane.start("a", "b")
        wait_for_shares(shares, 1)
        one, two = shares
        wait_for("members", lambda: len(read_sources(one)) == ENGINES)
        theirs = min(own_instances(two))
        new = [9_000 + token for token in range(64)]
        body = {"model": MODEL, "tokens": new, "candidates": [{"instance": theirs}], "expect_seconds": 30}
        assert one.post("/v1/select", body).json["instance"] == theirs
        expected = {"model": MODEL, "tokens": new, "expected": True}

        def expects(client: Client) -> bool:
            return holders(client, expected) == [theirs]

        wait_for("the expectation", lambda: expects(one) and expects(two))
        assert holders(one, {**expected, "expected": False}) == []


def test_sharded_replicas_need_the_same_token(server: NatsServer, tmp_path: Any) -> None:
    """With the right token, responses are complete. With another one, partitions of other replicas are reported as missing."""
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("0123456789abcdef" * 2)
    wrong.write_text("fedcba9876543210" * 2)
    access = {"tokens": [{"role": "read", "token": right.read_text()}], "anonymous": "none"}
    with open_plane(server, "tokens") as plane:
        good = Replica(server.url, plane.name, "good", access=access, shard={"token_file": str(right)})
        bad = Replica(server.url, plane.name, "bad", access=access, shard={"token_file": str(wrong)})
        try:
            for each in (good, bad):
                each.token = right.read_text()
            wait_for_shares([good, bad], 1)
            wait_for(
                "a complete response", lambda: good.post("/v1/match", BODY).json["missing"] == "" and plane.is_complete(good)
            )
            assert "no replica answers" in bad.post("/v1/match", BODY).json["missing"]
        finally:
            good.end()
            bad.end()


def test_a_second_process_with_the_same_name_waits(server: NatsServer) -> None:
    """The second one is refused until the first has ended."""
    with open_plane(server, "names") as plane:
        (first,) = plane.start("a")
        second = Replica(server.url, plane.name, "a")
        try:
            wait_for("a fault", lambda: "give each process its own --replica-name" in second.get("/health").body.decode())
            assert second.get("/readyz").status == 503
            assert second.served == frozenset()
            first.end()
            second.wait_until_ready()
            assert plane.is_complete(second)
        finally:
            second.end()


def test_queries_of_other_replicas_are_answered_for_served_partitions(server: NatsServer) -> None:
    """The response lists the partitions that it covers."""
    with open_plane(server, "parts") as plane:
        shares = plane.start("a", "b")
        wait_for_shares(shares, 1)
        one = shares[0]
        all_partitions = list(range(PARTITIONS))
        body = {"model": MODEL, "partitions": all_partitions, "keys": [[1]]}
        part = one.post("/v1/shard/match", body).json
        assert (set(part["partitions"]), part["known"], part["found"]) == (set(one.served), bool(own_instances(one)), [[]])
        members = one.post("/v1/shard/members", {"partitions": all_partitions}).json
        assert {each["registration"]["instance"] for each in members["members"]} == own_instances(one)
        assert members["version"] == part["version"]
        assert one.post("/v1/shard/members", {"partitions": [min(shares[1].served)]}).json["members"] == []
        whole = plane.whole()
        assert whole.post("/v1/shard/members", {"partitions": all_partitions}).status == 409
        assert msgspec.json.decode(whole.post("/v1/shard/match", body).body)["reason"] == "no-shard"
