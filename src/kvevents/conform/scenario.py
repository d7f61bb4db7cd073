"""The format of scenarios: JSON files that any program can play without kvevents.

A scenario has engines, the steps that happen to them, and checks, which have the right answer. Everything that an engine
sends is in the file: batches as JSON values, which the player encodes as msgpack one to one, or as bytes.
The page `reference/conformance.md` of the documentation explains the format; `schema.json` beside this module is its schema.

Scenarios of batches are in the dialect of the newest vLLM. `in_dialect` converts them to another release, so that every fault
can be played with every release.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from kvevents.errors import ConfigError
from kvevents.wire import Dialect, decode_batch, encode_batch

VERSION: Final = 1
"""Version of the format. It rises when an older player would misunderstand a file."""

Hex = Annotated[str, Meta(pattern="^([0-9a-f]{2})*$", description="bytes as hexadecimal digits")]
PlainName = Annotated[str, Meta(pattern="^[a-z0-9.-]+$")]
WaitSeconds = Annotated[float, Meta(ge=0.0, le=60.0)]
Ability = Literal["kill", "lora", "ranks", "register", "reports", "salt", "tenants", "unregister"]
"""What a target must be able to do: be killed and started again, match within an adapter, distinguish ranks of a worker, accept
engines while it runs, report single workers, match within a cache salt, separate tenants, remove engines while it runs."""

GROUPS: Final = {
    "dialects": "What each engine release sends",
    "losses": "Batches are lost",
    "restarts": "Processes end and come back",
    "bytes": "Bytes that are not batches",
    "blocks": "What events mean",
    "registration": "What is registered",
    "publishing": "What a publisher sends",
}
"""Groups of scenarios, each with its heading."""


class Tokens(Struct, frozen=True, forbid_unknown_fields=True, rename={"run": "$tokens"}):
    """Consecutive token ids."""

    run: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=0xFFFFFFFF)], Annotated[int, Meta(ge=0, le=1_000_000)]],
        Meta(description="the first token id, and how many there are"),
    ]

    @property
    def ids(self) -> list[int]:
        """The token ids."""
        first, count = self.run
        return list(range(first, first + count))


class ScenarioEngine(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An engine: a PUB socket for live batches, a ROUTER socket for replay, and a replay buffer."""

    worker: PlainName | None = None
    """Name of the worker in answers; the name of the engine by default. Ranks of one worker share it."""
    rank: Annotated[int, Meta(ge=0, le=1023)] = 0
    topic: str = ""
    replay: Literal["answers", "none", "dead", "silent"] = "answers"
    """`none`: the target is given no replay endpoint. `dead`: nothing listens at it. `silent`: it never answers."""
    replay_of: PlainName | None = None
    """The target is given the replay endpoint of this engine instead, which is a wrong setting."""
    address: Literal["engine", "unreachable", "unresolvable", "silent"] = "engine"
    """What the target is given as the endpoint: this engine's, a port where nothing listens, a name that does not exist, or a
    port that accepts connections and sends nothing."""
    buffer_steps: Annotated[int, Meta(ge=0)] = 10_000
    """Batches in the replay buffer. A request for an older start is answered from the oldest one on."""
    reply_shape: Literal["topic", "no-topic", "bare-end"] = "topic"
    """Frames of replies: with the topic (vLLM from 0.26, SGLang from 0.5.22), without it, or also with an end marker that has
    no sequence number."""
    replay_send_limit: Annotated[int, Meta(ge=0)] | None = None
    """Batches of one reply that arrive; the rest is dropped without notice, as by the engines' ROUTER sockets."""
    replay_holes: list[int] = []
    """Sequence numbers that are missing in replies."""
    replay_junk: list[list[Hex]] = []
    """Messages that are not replies, sent before each reply."""
    has_end_marker: bool = True
    is_endless: bool = False
    """Whether a reply repeats its batches and never ends."""
    faulty_replies: Annotated[int, Meta(ge=0)] | None = None
    """Number of requests, from the first one on, whose replies have the faults above. All by default."""


class Register(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="do", tag="register"):
    """Register the engine with the target, and wait up to 15 s until it subscribes, unless the target rejects it."""

    engine: PlainName
    tenant: str | None = None
    block_size: int | None = None
    """Block size of the registration; that of the scenario by default."""


class Unregister(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="unregister"):
    """Remove the engine from the target."""

    engine: PlainName


class Publish(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="do", tag="publish"):
    """Give a batch the next sequence number, store it for replay, and send it. It is `batch` in msgpack, or `payload`."""

    engine: PlainName
    batch: Any = None
    payload: Hex | None = None
    lost: bool = False
    """Whether the live message is lost."""
    times: Annotated[int, Meta(ge=1, le=100_000)] = 1


class Skip(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="skip"):
    """Use up the engine's next sequence number without a batch, as engines do that cannot encode one."""

    engine: PlainName


class Resend(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="resend"):
    """Send the live message of a stored batch, again or late: a duplicate, or a message out of order."""

    engine: PlainName
    seq: int


class Send(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="send"):
    """Send a message of any frames from the PUB socket. It takes no sequence number and is not stored."""

    engine: PlainName
    frames: list[Hex]


class Restart(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="restart"):
    """End the engine's process and start another at the same endpoints: nothing stored, sequence numbers from 0."""

    engine: PlainName


class Stop(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="stop"):
    """End the engine's process."""

    engine: PlainName


class Cut(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="cut"):
    """Close the target's connections to the engine, and refuse new ones until `heal`."""

    engine: PlainName


class Stall(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="stall"):
    """Let the network deliver nothing, with all connections open, until `heal`."""

    engine: PlainName


class HalfOpen(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="half-open"):
    """Let the connections that are open now deliver nothing for ever, as if a peer were replaced without closing them."""

    engine: PlainName


class Heal(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="heal"):
    """End `cut` or `stall`."""

    engine: PlainName


class AwaitSubscriber(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="await-subscriber"):
    """Wait up to 15 s until the target subscribes, again after a restart or a cut."""

    engine: PlainName


class Kill(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="kill"):
    """Kill the target's process (SIGKILL)."""


class Start(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="start"):
    """Start the killed target, and register again what it does not remember by itself."""


class Pause(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="pause"):
    """Wait."""

    seconds: WaitSeconds


class CheckQuery(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A prompt, and the right answer."""

    tokens: Tokens | list[int]
    held: dict[Annotated[str, Meta(pattern="^[a-z0-9.-]+(:[0-9]+)?$")], int]
    """Tokens of the longest prefix that each worker holds, on any tier; those of one rank under `worker:rank`. Workers
    that are left out hold none."""
    lora: str | None = None
    salt: str | None = None
    tenant: str | None = None

    @property
    def ids(self) -> list[int]:
        """The token ids of the prompt."""
        return self.tokens.ids if isinstance(self.tokens, Tokens) else self.tokens


class Settle(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="settle"):
    """Wait until the answers are right, for `within` seconds at most. What they are is not judged."""

    queries: list[CheckQuery]
    within: WaitSeconds = 5.0


class Check(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="do", tag="check"):
    """Ask until the answers are right and stay right for a moment, for `within` seconds at most, and judge."""

    queries: list[CheckQuery] = []
    reports: list[PlainName] = []
    """Workers that the target must report as not well, because no answer about them can be right."""
    within: WaitSeconds = 8.0


Step = (
    Register
    | Unregister
    | Publish
    | Skip
    | Resend
    | Send
    | Restart
    | Stop
    | Cut
    | Stall
    | HalfOpen
    | Heal
    | AwaitSubscriber
    | Kill
    | Start
    | Pause
    | Settle
    | Check
)


class Scenario(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="target", tag="reader"):
    """Engines, what happens to them, and the right answers of a program that reads their events."""

    version: Literal[1]
    """Version of this format."""
    name: PlainName
    title: str
    """What happens, in one phrase."""
    group: Literal["dialects", "losses", "restarts", "bytes", "blocks", "registration"]
    engines: dict[PlainName, ScenarioEngine]
    steps: Annotated[list[Step], Meta(min_length=1)]
    block_size: Annotated[int, Meta(ge=1)] = 16
    needs: list[Ability] = []

    def worker(self, engine: str) -> str:
        """The name of an engine's worker."""
        return self.engines[engine].worker or engine


class FeedBatches(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="feed"):
    """Give the publisher batches. Each stores one block: batch n of an incarnation stores block n behind block n - 1."""

    batches: Annotated[int, Meta(ge=1, le=100_000)]


class Subscribe(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="do", tag="subscribe"):
    """Connect a SUB socket, and wait until its connection is open."""

    reader: PlainName
    stalls: bool = False
    """Whether it reads nothing and has a short queue, like a consumer that hangs."""


class SendRequest(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="send-request"):
    """Send a message of any frames from a DEALER socket to the replay endpoint. No reply is awaited."""

    frames: list[Hex]


class RestartPublisher(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="restart-publisher"):
    """Kill the publisher's process, and start another at the same endpoints."""


class EndPublisher(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="end-publisher"):
    """Let the publisher end in order: it has sent what it was given."""


class CheckLive(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="do", tag="check-live"):
    """Read until a reader has received these numbers, each once and in order, with what was given for them."""

    reader: PlainName
    first: int
    last: int
    within: WaitSeconds = 8.0


class CheckReplay(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="do", tag="check-replay"):
    """Request everything from a number on. A consumer that applies the reply holds what was given from there on, or all."""

    start: int
    consumers: Annotated[int, Meta(ge=1, le=100)] = 1
    """Concurrent requests, each from a socket of its own."""
    delay: WaitSeconds = 0.0
    """Time until the consumers begin to read."""
    within: WaitSeconds = 8.0


class CheckWatched(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="check-watched"):
    """Read live batches for some seconds, after 10 batches if the publisher can be fed, and compare them with their replay."""

    seconds: WaitSeconds


PublisherStep = (
    FeedBatches | Subscribe | SendRequest | RestartPublisher | EndPublisher | Pause | CheckLive | CheckReplay | CheckWatched
)


class PublisherScenario(
    Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="target", tag="publisher"
):
    """What a publisher is given, and what its consumers must receive."""

    version: Literal[1]
    name: PlainName
    title: str
    steps: Annotated[list[PublisherStep], Meta(min_length=1)]
    group: Literal["publishing"] = "publishing"
    buffer_steps: Annotated[int, Meta(ge=1)] = 10_000
    """Batches in the replay buffer."""
    needs: list[Literal["feed"]] = []
    """Whether the publisher must take batches from the referee."""


AnyScenario = Scenario | PublisherScenario


def expand(value: Any) -> Any:
    """Return a batch's JSON value with `{"$tokens": [first, count]}` and `{"$hex": digits}` replaced by what they mean."""
    if isinstance(value, list):
        return [expand(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$tokens"}:
        first, count = value["$tokens"]
        return list(range(first, first + count))
    if value.keys() == {"$hex"}:
        return bytes.fromhex(value["$hex"])
    return {key: expand(item) for key, item in value.items()}


def read_scenario(text: bytes | str, place: str = "scenario") -> AnyScenario:
    """Return the scenario of a JSON text. Raise `ConfigError`, which names `place`, if it does not have the format."""
    try:
        scenario: AnyScenario = msgspec.json.decode(text, type=AnyScenario)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"invalid {place}: {error}; the format is version {VERSION} of `kvevents.conform`") from error
    if isinstance(scenario, PublisherScenario):
        return scenario
    unknown = {name for step in scenario.steps if (name := getattr(step, "engine", None)) and name not in scenario.engines}
    if unknown:
        raise ConfigError(f"invalid {place}: steps name engines that it does not have: {', '.join(sorted(unknown))}")
    return scenario


def shipped_scenarios() -> Iterator[AnyScenario]:
    """Yield the scenarios of this package, in the order of `GROUPS` and then by name."""
    folder = files("kvevents.conform") / "scenarios"
    found = [read_scenario(each.read_bytes(), each.name) for each in folder.iterdir() if each.name.endswith(".json")]
    order = list(GROUPS)
    yield from sorted(found, key=lambda each: (order.index(each.group), each.name))


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a scenario."""
    schema = msgspec.json.schema(AnyScenario)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:kvevents:conform:scenario:{VERSION}",
        "title": f"kvevents conformance scenario, version {VERSION}",
        **schema,
    }


def payload_of(step: Publish) -> bytes:
    """Return the bytes of the batch that a step publishes."""
    return bytes.fromhex(step.payload) if step.payload is not None else msgspec.msgpack.encode(expand(step.batch))


DEFAULT_MEDIUM: Final = "GPU"
"""The medium of events that name none."""


def in_dialect(scenario: Scenario, dialect: Dialect) -> Scenario | None:
    """Return the scenario with the batches and replies of a release. Return None if the release cannot express the scenario.

    Payloads that are not batches stay as they are.
    """
    steps = [_publish_in_dialect(step, dialect) if isinstance(step, Publish) else step for step in scenario.steps]
    if None in steps:
        return None
    shape = "topic" if dialect.has_replay_topic else "no-topic"
    engines = {
        name: msgspec.structs.replace(engine, reply_shape=shape if engine.reply_shape == "topic" else engine.reply_shape)
        for name, engine in scenario.engines.items()
    }
    return msgspec.structs.replace(scenario, name=f"{scenario.name}.{dialect}", steps=steps, engines=engines)


def _publish_in_dialect(step: Publish, dialect: Dialect) -> Publish | None:
    if step.batch is None:
        return step
    original = decode_batch(payload_of(step))
    if original.rejected:
        return None
    payload = encode_batch(original.batch, dialect)
    if _facts(payload) != _facts(payload_of(step)):
        return None
    return msgspec.structs.replace(step, batch=None, payload=payload.hex())


def _facts(payload: bytes) -> list[dict[str, Any]]:
    """Return the content of a batch's events, in a form that does not depend on the dialect."""
    events = [msgspec.to_builtins(event) for event in decode_batch(payload).batch.events]
    for event in events:
        event["medium"] = event.get("medium") or DEFAULT_MEDIUM
    return events
