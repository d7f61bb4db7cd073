"""Faults of the plugin in vLLM: the engine continues, its log has one line, and events are published."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq

from kvevents import Reset, Source, Subscriber, Trust
from kvevents.engines import vllm
from kvevents.engines.plugin import VARIABLE, EngineSettings
from kvevents.index import PrefixIndex
from kvevents.publisher.base import QueuedPublisher
from kvevents.publisher.event_server import EventSocket
from kvevents.zeromq.keys import KeyPair, write_pair
from publisher_cases import find_faults_in_fork, wait_until
from vllm_stand_in import Vllm, installed_engine, key_of, make_store, schedulers_of_a_test  # noqa: F401 - fixtures

ENDPOINTS: dict[str, Any] = {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
SETTINGS = '{"heartbeat": 0.05, "limits": {"error_delay": 0.001, "poll_interval": 60}}'
"""Settings without polls, whose log lines about single batches depend on time."""
BLOCKS = 8
MAX_FAILURES = EngineSettings().max_failures


@pytest.fixture(autouse=True)
def set_short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SETTINGS)
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")


@pytest.fixture
def start(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Start a scheduler with these options, after vLLM has loaded its plugins."""

    def start_one(**options: Any) -> Any:
        load_plugins()
        return schedule(**{**ENDPOINTS, **options})

    return start_one


def load_plugins() -> None:
    """Load the entry point as `load_plugins_by_group` of vLLM does, which logs an error if it cannot be imported."""
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="kvevents")
    try:
        register = entry.load()
    except ImportError:
        logging.getLogger("vllm.plugins").exception("Failed to load plugin %s", entry.name)
    else:
        register()


def source_of(publisher: Any) -> Source:
    return Source(publisher.endpoint, replay_endpoint=publisher.replay_endpoint, name="engine")


def follow(publisher: Any, until: Callable[[PrefixIndex], bool]) -> None:
    """Apply the batches of a publisher to the index of a new consumer until `until` accepts the index."""
    consumer = Consumer(publisher)
    try:
        consumer.wait_until(lambda: until(consumer.index), "the blocks of the engine")
    finally:
        consumer.subscriber.close()


def logged_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log messages of the engine and of the plugin."""
    return [each.getMessage() for each in caplog.records if each.name.startswith(("vllm", "kvevents"))]


def count_blocks(index: PrefixIndex) -> int:
    return sum(worker.blocks for worker in index.workers())


def raise_error(*_arguments: Any, **_named: Any) -> Any:
    raise RuntimeError("broken on purpose")


handlers: list[logging.Handler] = []


@pytest.fixture(autouse=True)
def close_handlers() -> Iterator[None]:
    yield
    while handlers:
        with suppress(OSError):
            handlers.pop().close()


# --- faults -------------------------------------------------------------------------------------------------------------------


def break_import(engine: Vllm, patch: pytest.MonkeyPatch) -> None:
    """Make the module of the entry point fail to import."""
    patch.setitem(sys.modules, "kvevents.engines.vllm", None)


def break_settings(engine: Vllm, patch: pytest.MonkeyPatch) -> None:
    patch.setenv(VARIABLE, '{"heartbeet": 1}')


def break_registry(engine: Vllm, patch: pytest.MonkeyPatch) -> None:
    """Remove the type of batches, as a release with another type would."""
    patch.delattr(engine.events, "KVEventBatch")


def break_constructor(engine: Vllm, patch: pytest.MonkeyPatch) -> None:
    """Set an option that vLLM accepts, and the plugin does not."""
    patch.setitem(ENDPOINTS, "hwm", -1)


def break_module(engine: Vllm, patch: pytest.MonkeyPatch) -> None:
    """Remove the module of the block pool, as a release that has moved it would."""
    patch.setitem(sys.modules, "vllm.v1.core.block_pool", None)


def break_link(engine: Vllm, patch: pytest.MonkeyPatch) -> None:
    """Make the cache manager reject attributes of kvevents."""

    def refuse(manager: Any, name: str, value: Any) -> None:
        if name.startswith("kvevents"):
            raise AttributeError(name)
        object.__setattr__(manager, name, value)

    manager = sys.modules["vllm.v1.core.kv_cache_manager"].KVCacheManager
    patch.setattr(manager, "__setattr__", refuse)


def break_cache_keys(engine: Vllm, patch: pytest.MonkeyPatch) -> None:
    """Change the form of the keys of the cache, as another release could."""
    patch.setattr("vllm_stand_in.key_of", lambda block_hash, group: f"{block_hash} of group {group}")


def break_publish(engine: Vllm, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(QueuedPublisher, "publish", raise_error)


def break_send(engine: Vllm, patch: pytest.MonkeyPatch) -> None:
    """Make every send on a socket fail."""
    patch.setattr(EventSocket, "send", raise_error)


def break_encoding(engine: Vllm, patch: pytest.MonkeyPatch) -> None:
    """Let the first events be of a type that cannot be encoded."""
    first = iter([object()] * MAX_FAILURES)
    patch.setattr("vllm_stand_in.make_store", lambda *store: next(first, None) or make_store(*store))


def break_thread(engine: Vllm, patch: pytest.MonkeyPatch) -> None:
    """Make the publisher thread end after a failure: it cannot sleep so long."""
    break_send(engine, patch)
    patch.setenv(VARIABLE, SETTINGS.replace("0.001", "1e300"))


def fill_disk_of_log(engine: Vllm, patch: pytest.MonkeyPatch) -> None:
    """Write the log of vLLM to a full disk, and make every send fail."""
    handler = logging.FileHandler("/dev/full")
    handlers.append(handler)
    patch.setattr(logging.getLogger("vllm"), "handlers", [handler, *logging.getLogger("vllm").handlers])
    patch.setattr(logging, "raiseExceptions", False)
    patch.setattr(EventSocket, "send", raise_error)


class FaultCase(NamedTuple):
    """A fault and its expected consequences."""

    fault: Callable[[Vllm, pytest.MonkeyPatch], None]
    line: str
    """The beginning of the only line of the log."""
    publisher: str
    """The publisher that sends events after the fault: vLLM's (`own`), the plugin's, or first the plugin's and then vLLM's."""


UNUSED = "kvevents is not used: vLLM publishes KV cache events itself"
NO_ATTESTATION = "kvevents: attestation is switched off: a hook failed"
TAKEOVER = "kvevents is not used any more: vLLM publishes KV cache events itself from number"
FAULT_CASES = [
    FaultCase(break_import, "Failed to load plugin kvevents", "own"),
    FaultCase(break_settings, UNUSED, "own"),
    FaultCase(break_registry, UNUSED, "own"),
    FaultCase(break_constructor, UNUSED, "own"),
    FaultCase(break_module, NO_ATTESTATION, "plugin"),
    FaultCase(break_link, NO_ATTESTATION, "plugin"),
    FaultCase(break_cache_keys, NO_ATTESTATION, "plugin"),
    FaultCase(break_publish, TAKEOVER, "own after plugin"),
    FaultCase(break_send, TAKEOVER, "own after plugin"),
    FaultCase(break_encoding, TAKEOVER, "own after plugin"),
    FaultCase(break_thread, TAKEOVER, "own after plugin"),
    FaultCase(fill_disk_of_log, TAKEOVER, "own after plugin"),
]


@pytest.mark.parametrize("case", FAULT_CASES, ids=lambda case: case.fault.__name__)
def test_the_engine_continues_and_events_are_published(
    case: FaultCase, start: Callable[..., Any], engine: Vllm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The scheduler runs its steps, and a consumer that connects after the fault receives the blocks of later steps."""
    caplog.set_level("WARNING")
    with monkeypatch.context() as patch:
        case.fault(engine, patch)
        scheduler = start()
        publisher = scheduler.kv_event_publisher
        for block in range(BLOCKS):
            scheduler.pool.store(block + 1, block)
            scheduler.step()
        if case.publisher == "own after plugin":
            wait_until(lambda: engine.own_publishers, "the takeover")
        for block in range(BLOCKS, 2 * BLOCKS):
            scheduler.pool.store(block + 1, block)
            scheduler.step()
        assert scheduler.reset_prefix_cache()
        for block in range(BLOCKS):
            scheduler.pool.store(block + 1, block)
            scheduler.step()
        if case.publisher == "own":
            assert type(publisher) is engine.own_publisher
        else:
            assert isinstance(publisher, vllm.VllmEventPublisher)
            assert len(engine.own_publishers) == (case.publisher == "own after plugin")
        follow(publisher, lambda index: count_blocks(index) == BLOCKS)
    # The publisher thread writes it after the takeover.
    wait_until(lambda: logged_lines(caplog), "the line in the log")
    (line,) = logged_lines(caplog)
    assert line.startswith(case.line)


@pytest.mark.parametrize(
    "text",
    [
        '{"curve": {"key_file": "/nowhere/engine.key_secret"}}',
        '{"curve": {"public_key": "x", "secret_key": "y"}, "heartbeat": 5}',
        '{"curve": {"key_fiel": "x"}}',
        '{"curv": {}}',
        '{"curve": ',
        "/nowhere/publisher.toml",
    ],
)
def test_nothing_is_published_if_settings_that_may_ask_for_keys_cannot_be_used(
    text: str, start: Callable[..., Any], engine: Vllm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's own publisher has no keys, so the engine gets its null publisher."""
    monkeypatch.setenv(VARIABLE, text)
    assert_publishes_nothing(start, engine, caplog)


def test_nothing_is_published_if_a_publisher_with_keys_cannot_be_created(
    start: Callable[..., Any],
    engine: Vllm,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    write_keys: Callable[[], str],
) -> None:
    monkeypatch.setenv(VARIABLE, write_keys())
    monkeypatch.setattr(vllm.VllmEventPublisher, "__init__", raise_error)
    assert_publishes_nothing(start, engine, caplog)


def test_nothing_is_published_with_keys_if_another_package_has_replaced_the_publisher(
    start: Callable[..., Any],
    engine: Vllm,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    write_keys: Callable[[], str],
) -> None:
    monkeypatch.setenv(VARIABLE, write_keys())
    engine.factory._registry["zmq"] = type("Other", (), {})
    assert_publishes_nothing(start, engine, caplog)


def test_an_engine_of_an_unknown_release_does_not_start_with_keys(
    engine: Vllm, monkeypatch: pytest.MonkeyPatch, write_keys: Callable[[], str]
) -> None:
    """There is no place to prevent its own publisher."""
    monkeypatch.setenv(VARIABLE, write_keys())
    monkeypatch.delattr(engine.events, "EventPublisherFactory")
    with pytest.raises(AttributeError, match="EventPublisherFactory"):
        load_plugins()


@pytest.fixture
def write_keys(tmp_path: Path) -> Callable[[], str]:
    """Write a pair of keys; return settings that use it."""

    def write() -> str:
        public, secret = zmq.curve_keypair()
        path = write_pair(tmp_path / "engine", KeyPair(public.decode(), secret.decode()), "", replace=False)[1]
        return f'{{"curve": {{"key_file": "{path}"}}}}'

    return write


def assert_publishes_nothing(start: Callable[..., Any], engine: Vllm, caplog: pytest.LogCaptureFixture) -> None:
    """The scheduler runs its steps with the engine's null publisher, and the log says why."""
    caplog.set_level("WARNING")
    scheduler = start()
    assert type(scheduler.kv_event_publisher) is engine.events.NullEventPublisher
    assert not engine.own_publishers
    scheduler.pool.store(1, 0)
    scheduler.step()
    assert scheduler.reset_prefix_cache()
    (line,) = logged_lines(caplog)
    assert line.startswith("kvevents is not used: no KV cache events are published, since the settings ask for keys: ")


def test_hooks_pass_on_arguments_that_they_do_not_know(
    start: Callable[..., Any], engine: Vllm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A later release can pass further arguments to its methods, by position or by name. The cache is attested nevertheless."""
    caplog.set_level("WARNING")
    passed: list[Any] = []

    def accept_more(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def method(self: Any, *arguments: Any, later: Any = None, **named: Any) -> Any:
            passed.append((name, later))
            return original(self, *arguments, **named)

        monkeypatch.setattr(owner, name, method)

    manager = sys.modules["vllm.v1.core.kv_cache_manager"].KVCacheManager
    block_map, scheduler_class = engine.pool.BlockHashToBlockMap, engine.scheduler
    for owner, name in (
        (block_map, "insert"),
        (block_map, "pop"),
        (manager, "take_events"),
        (scheduler_class, "reset_prefix_cache"),
    ):
        accept_more(owner, name)
    scheduler = start()
    cache = scheduler.pool.cached_block_hash_to_block
    cache.insert(block=0, key=key_of(5, 0), later=1)
    cache.insert(key_of(6, 0), 1, later=2)
    assert cache.pop(block_id=1, key=key_of(6, 0), later=3) == 1
    assert scheduler.kv_cache_manager.take_events(later=4) == []
    assert scheduler.kv_event_publisher._attestation() == 5
    assert scheduler.reset_prefix_cache(later=5)
    assert [later for _, later in passed if later] == [1, 2, 3, 4, 5]
    assert not logged_lines(caplog)


def test_a_port_in_use_is_reported_by_vllm_itself(
    start: Callable[..., Any], engine: Vllm, caplog: pytest.LogCaptureFixture
) -> None:
    """The publisher of vLLM is tried and fails as without the plugin, so the engine does not start without events."""
    used_endpoint = start().kv_event_publisher.endpoint
    with pytest.raises(zmq.ZMQError, match="in use"):
        start(endpoint=used_endpoint.replace("127.0.0.1", "*"))
    assert caplog.text.count("kvevents is not used") == 1


# --- consumers ----------------------------------------------------------------------------------------------------------------


class Consumer:
    """A consumer with an index that records the reasons of resets."""

    def __init__(self, publisher: Any) -> None:
        self.index = PrefixIndex()
        self.resets: list[str] = []
        self.subscriber = Subscriber(source_of(publisher))

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Apply deliveries until the condition is true."""

        def is_reached() -> object:
            for delivery in self.subscriber.receive_many(timeout=0.01):
                if isinstance(delivery, Reset):
                    self.resets.append(delivery.reason)
                self.subscriber.report(delivery, self.index.apply(delivery).report)
            return condition()

        wait_until(is_reached, what)

    def await_blocks(self, count: int, trust: Trust) -> None:
        self.wait_until(lambda: (count_blocks(self.index), self.trust()) == (count, trust), f"{count} blocks and {trust!r}")

    def trust(self) -> Trust:
        return self.subscriber.trust("engine")


@pytest.fixture
def consume() -> Iterator[Callable[[Any], Consumer]]:
    consumers: list[Consumer] = []

    def start_one(publisher: Any) -> Consumer:
        consumers.append(Consumer(publisher))
        return consumers[-1]

    yield start_one
    for each in consumers:
        each.subscriber.close()


def test_a_connected_consumer_loses_no_batch_if_sockets_fail(
    engine: Vllm, start: Callable[..., Any], consume: Callable[[Any], Consumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher of vLLM replays the unsent batches and continues their numbers, so the stream becomes EXACT again."""
    scheduler = start()
    publisher = scheduler.kv_event_publisher
    for block in range(BLOCKS):
        scheduler.pool.store(block + 1, block)
        scheduler.step()
    consumer = consume(publisher)
    consumer.await_blocks(BLOCKS, Trust.EXACT)
    consumer.resets.clear()
    with monkeypatch.context() as patch:
        patch.setattr(EventSocket, "send", raise_error)
        for block in range(BLOCKS, 2 * BLOCKS):
            scheduler.pool.store(block + 1, block)
            scheduler.step()
        wait_until(lambda: engine.own_publishers, "the takeover")
    scheduler.pool.evict(1, 0)
    scheduler.step()
    consumer.wait_until(lambda: count_blocks(consumer.index) == 2 * BLOCKS - 1, "the other blocks")
    scheduler.pool.store(1, 0)  # a live batch on the new connection confirms the replayed batches
    scheduler.step()
    consumer.await_blocks(2 * BLOCKS, Trust.EXACT)
    assert not consumer.resets


def test_a_connected_consumer_receives_a_gap_for_lost_batches(
    engine: Vllm, start: Callable[..., Any], consume: Callable[[Any], Consumer]
) -> None:
    """Batches that were not stored for replay cannot be repaired. A clear makes the stream EXACT again."""
    scheduler = start()
    scheduler.pool.store(1, 0)
    scheduler.step()
    consumer = consume(scheduler.kv_event_publisher)
    consumer.await_blocks(1, Trust.EXACT)
    for _ in range(MAX_FAILURES):
        scheduler.pool.queue.append(object())
        scheduler.step()
    wait_until(lambda: engine.own_publishers, "the takeover")
    consumer.wait_until(lambda: "lost" in (consumer.trust().reason or ""), "the gap, although no batch follows")
    scheduler.pool.store(3, 2)
    scheduler.step()
    consumer.await_blocks(2, Trust.DEGRADED)
    assert scheduler.reset_prefix_cache()
    scheduler.pool.store(4, 3)
    scheduler.step()
    consumer.await_blocks(1, Trust.EXACT)


def test_ranks_keep_their_ports_in_a_takeover(engine: Vllm, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher of vLLM adds its rank to ports; the takeover accounts for it, also for ports that the OS chose."""
    scheduler = start(rank=3)
    publisher = scheduler.kv_event_publisher
    source = source_of(publisher)
    with monkeypatch.context() as patch:
        patch.setattr(EventSocket, "send", raise_error)
        scheduler.pool.store(1, 0)
        scheduler.step()
        wait_until(lambda: engine.own_publishers, "the takeover")
    assert source_of(engine.own_publishers[0]) == source


def test_separate_failures_do_not_end_the_publisher(
    engine: Vllm, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A consumer receives all batches, and the log has one line each time that sending works again."""
    scheduler = start()
    publisher = scheduler.kv_event_publisher
    fails = iter([True, False] * MAX_FAILURES)

    def fail_every_other_time(socket: EventSocket, topic: bytes, batches: Any) -> None:
        if next(fails, False):
            raise RuntimeError("broken on purpose")
        send(socket, topic, batches)

    send = EventSocket.send
    monkeypatch.setattr(EventSocket, "send", fail_every_other_time)
    for block in range(BLOCKS):
        scheduler.pool.store(block + 1, block)
        scheduler.step()
        wait_until(lambda: publisher.stats().queued == 0, "the batch to be sent or to fail")
    follow(publisher, lambda index: count_blocks(index) == BLOCKS)
    # Replay can answer before the next send.
    wait_until(lambda: caplog.text.count("sending works again") == MAX_FAILURES, "the lines in the log")
    assert caplog.text.count("sending works again after 1 failures") == MAX_FAILURES
    assert not engine.own_publishers


def test_streams_with_curve_keys_are_not_continued_without_them(
    engine: Vllm, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The publisher of vLLM has no encryption, so the plugin retries instead."""
    public, private = zmq.curve_keypair()
    _, secret = write_pair(tmp_path / "engine", KeyPair(public.decode(), private.decode()), "", replace=False)
    monkeypatch.setenv(VARIABLE, f'{{"curve": {{"key_file": "{secret}"}}, "limits": {{"error_delay": 0.001}}}}')
    scheduler = start()
    publisher = scheduler.kv_event_publisher
    with monkeypatch.context() as patch:
        patch.setattr(EventSocket, "send", raise_error)
        for block in range(BLOCKS):
            scheduler.pool.store(block + 1, block)
            scheduler.step()
        wait_until(lambda: publisher.stats().failures.get("thread", 0) > 5, "several failures")
        assert not engine.own_publishers
    assert "publishing continues with the next batch" in caplog.text


def test_a_forked_child_does_not_take_over(engine: Vllm, start: Callable[..., Any]) -> None:
    publisher = start().kv_event_publisher

    def find_faults() -> list[str]:
        publisher.publish(engine.events.KVEventBatch(ts=0.0, events=[]))
        faults = ["the child took over"] if engine.own_publishers else []
        return faults if publisher.stats().dropped["ended"] == 1 else [*faults, "the batch was not counted"]

    assert find_faults_in_fork(find_faults) == ""


def test_a_terminated_context_leads_to_a_takeover(
    engine: Vllm, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sockets raise `ContextTerminated` after another part of the process has terminated their context."""

    def send(*_arguments: Any) -> None:
        raise zmq.ContextTerminated

    scheduler = start()
    with monkeypatch.context() as patch:
        patch.setattr(EventSocket, "send", send)
        for block in range(BLOCKS):
            scheduler.pool.store(block + 1, block)
            scheduler.step()
        wait_until(lambda: engine.own_publishers, "the takeover")
    assert scheduler.reset_prefix_cache()
    for block in range(BLOCKS):
        scheduler.pool.store(block + 1, block)
        scheduler.step()
    follow(scheduler.kv_event_publisher, lambda index: count_blocks(index) == BLOCKS)


def test_if_the_publisher_of_vllm_fails_too_the_log_reports_that_nothing_is_published(
    engine: Vllm, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    scheduler = start()
    publisher = scheduler.kv_event_publisher
    monkeypatch.setattr(engine.own_publisher, "__init__", raise_error)
    monkeypatch.setattr(EventSocket, "send", raise_error)
    scheduler.pool.store(1, 0)
    scheduler.step()
    wait_until(lambda: logged_lines(caplog), "the failed takeover")
    scheduler.pool.store(2, 1)
    scheduler.step()
    assert publisher.stats().dropped["ended"] == 1
    assert caplog.text.count("no KV cache events are published from now on") == 1
