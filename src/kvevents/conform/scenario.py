"""The format of scenarios: JSON files that any program can play without kvevents.

A scenario has engines, steps that happen to them, and checks with the right answers. The file has everything that an engine
sends, as bytes, as JSON values, or as macros that become events in the forms of a release. It states which answers must be
right, which workers may be reported, how long a player waits, the rule from which the right answers follow, and the rule's
source. The page `reference/conformance.md` explains the format; `schema.json` beside this module is its schema.

A scenario has the forms of the newest vLLM unless it states others. `to_dialect` gives a scenario the forms of another release,
so that every fault can be played with every release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from kvevents.errors import ConfigError

VERSION: Final = 2
"""Version of the format. If older players would misunderstand a change of the format, the change increases this number."""

HexText = Annotated[str, Meta(pattern="^([0-9a-f]{2})*$", description="bytes as hexadecimal digits")]
PlainName = Annotated[str, Meta(pattern="^[a-z0-9.-]+$")]
WaitSeconds = Annotated[float, Meta(ge=0.0, le=60.0)]
Ability = Literal["kill", "lora", "ranks", "register", "reports", "salt", "tenants", "unregister"]
"""What a target can do, in this order: be killed and started again, match within a LoRA, distinguish ranks of a worker, accept
engines while running, report problems of a worker, match within a salt, separate tenants, remove engines while running."""

GROUPS: Final = {
    "dialects": "What each engine release sends",
    "healthy": "Nothing goes wrong",
    "losses": "Batches are lost",
    "restarts": "Processes end and come back",
    "bytes": "Bytes that are not batches",
    "blocks": "What events mean",
    "registration": "What is registered",
    "publishing": "What a publisher sends",
}
"""Maps the name of each group of scenarios to the heading of the group."""


class Tokens(Struct, frozen=True, forbid_unknown_fields=True, rename={"run": "$tokens"}):
    """Consecutive token ids."""

    run: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=0xFFFFFFFF)], Annotated[int, Meta(ge=0, le=1_000_000)]],
        Meta(description="the first token id, and how many there are"),
    ]


class ScenarioEngine(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An engine: a PUB socket for live batches, a ROUTER socket for replay, and a replay buffer."""

    seed: Annotated[int, Meta(ge=0, le=0xFFFFFFFF)] = 1
    """Seed of the hashes in `$store`. Two engines with different seeds have different hashes for equal tokens."""
    worker: PlainName | None = None
    """Name of the worker in answers; the name of the engine by default. The ranks of one worker share one name."""
    rank: Annotated[int, Meta(ge=0, le=1023)] = 0
    topic: str = ""
    replay: Literal["answers", "none", "dead", "silent"] = "answers"
    """`none`: the target gets no replay endpoint. `dead`: no process listens at the endpoint. `silent`: requests to the
    endpoint get no replies."""
    replay_of: PlainName | None = None
    """Name of another engine whose replay endpoint the target gets, as if an operator had set the wrong endpoint."""
    address: Literal["engine", "unreachable", "unresolvable", "silent"] = "engine"
    """The endpoint that the target gets: the engine's endpoint, a port where nothing listens, a host name that does not exist,
    or a port that accepts connections and sends nothing."""
    buffer_steps: Annotated[int, Meta(ge=0)] = 10_000
    """Number of batches in the replay buffer. A reply to a request for older batches begins with the buffer."""
    reply_shape: Literal["topic", "no-topic", "bare-end"] = "topic"
    """`topic`: replies have a topic (vLLM from 0.26, SGLang from 0.5.22). `no-topic`: replies have no topic. `bare-end`:
    replies have no topic, and the end marker has no sequence number."""
    replay_send_limit: Annotated[int, Meta(ge=0)] | None = None
    """Maximum number of batches in one reply. As in engines, the ROUTER socket drops further batches without notice."""
    replay_holes: list[int] = []
    """Sequence numbers that are missing in replies."""
    replay_junk: list[list[HexText]] = []
    """Messages that are not replies, sent before each reply."""
    has_end_marker: bool = True
    is_endless: bool = False
    """Whether a reply repeats its batches and never ends."""
    faulty_replies: Annotated[int, Meta(ge=0)] | None = None
    """Number of replay requests, from the first one on, whose replies have the faults that the fields from
    `replay_send_limit` to `is_endless` describe. None means all requests."""


class Forms(Struct, frozen=True, forbid_unknown_fields=True):
    """The forms of batches and events of a release: JSON values in which `$`-words are placeholders. The default is vLLM 0.33.

    `$time` is 1760000000 plus 1/16 s for each earlier batch of the scenario; `$milliseconds` is `$time` in milliseconds.
    """

    batch: Any = msgspec.field(default_factory=lambda: ["$time", "$events", "$rank"])
    store: Any = msgspec.field(
        default_factory=lambda: {
            "type": "BlockStored",
            "block_hashes": ["$hash"],
            "parent_block_hash": "$parent",
            "token_ids": "$tokens",
            "block_size": "$block_size",
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
    )
    """Form of an event that stores one block."""
    remove: Any = msgspec.field(default_factory=lambda: {"type": "BlockRemoved", "block_hashes": "$hashes", "medium": "GPU"})
    clear: Any = msgspec.field(default_factory=lambda: {"type": "AllBlocksCleared"})
    hashes: Literal["unsigned", "signed", "bytes"] = "unsigned"
    """Form of a hash: an integer of 64 bits, or 32 bytes that end with the integer, big-endian."""

    def can_express(self, event: Any) -> bool:
        """Return whether an event is a macro, and each field that the macro changes exists in the form of the release."""
        for macro, form in (("$store", self.store), ("$remove", self.remove), ("$clear", self.clear)):
            if isinstance(event, dict) and macro in event:
                return len(event) == 1 or (isinstance(form, dict) and event.keys() - {macro} <= form.keys())
        return False


class _Step(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="do"):
    """A step of a scenario."""


class _EngineStep(_Step, frozen=True):
    """A step of one engine."""

    engine: PlainName


class Register(_EngineStep, frozen=True, tag="register"):
    """Register the engine with the target, and wait until the target subscribes, unless the target rejects the engine."""

    tenant: str | None = None
    block_size: int | None = None
    """Block size in the registration; the scenario's block size by default."""


class Unregister(_EngineStep, frozen=True, tag="unregister"):
    """Remove the engine from the target."""


class Store(_EngineStep, frozen=True, tag="store"):
    """Publish blocks of a prompt, each in its own batch, as `publish` does with `[{"$store": [prompt, place, 1]}]`."""

    prompt: Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
    """First token id of the prompt; the ids that follow are consecutive."""
    blocks: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=1)]]
    """Position of the first block in the prompt, counted in blocks from 0, and number of blocks."""
    lost: bool = False
    """Whether the live messages are lost."""


class Publish(_EngineStep, frozen=True, tag="publish"):
    """Give a batch the next sequence number, store it for replay, and send it.

    The payload is one of these: `events` in the form of a batch, encoded as msgpack; `batch`, encoded as msgpack; `payload`.
    """

    events: list[Any] | None = None
    batch: Any = None
    payload: HexText | None = None
    lost: bool = False
    """Whether the live message is lost."""
    times: Annotated[int, Meta(ge=1, le=100_000)] = 1


class Skip(_EngineStep, frozen=True, tag="skip"):
    """Skip the engine's next sequence number, as an engine does if it cannot encode a batch."""


class Resend(_EngineStep, frozen=True, tag="resend"):
    """Send the live message of a stored batch now. The target receives it as a duplicate or out of order."""

    seq: int


class Send(_EngineStep, frozen=True, tag="send"):
    """Send a message with the given frames from the PUB socket. The message gets no sequence number and is not stored."""

    frames: list[HexText]


class Restart(_EngineStep, frozen=True, tag="restart"):
    """End the engine's process and start another at the same endpoints, with an empty buffer and numbers from 0."""


class Stop(_EngineStep, frozen=True, tag="stop"):
    """End the engine's process."""


class Cut(_EngineStep, frozen=True, tag="cut"):
    """Close the target's connections to the engine, and refuse new ones until `heal`."""


class Stall(_EngineStep, frozen=True, tag="stall"):
    """Let the network deliver nothing until `heal`. All connections stay open."""


class HalfOpen(_EngineStep, frozen=True, tag="half-open"):
    """Let the open connections deliver nothing from now on, as if a peer were replaced without closing its connections."""


class Heal(_EngineStep, frozen=True, tag="heal"):
    """End `cut` or `stall`."""


class AwaitSubscriber(_EngineStep, frozen=True, tag="await-subscriber"):
    """Wait until the target subscribes, for the first time or again after a restart or a cut."""


class Kill(_Step, frozen=True, tag="kill"):
    """Kill the target's process (SIGKILL)."""


class Start(_Step, frozen=True, tag="start"):
    """Start the killed target. Register again those engines that the target has not stored."""


class Pause(_Step, frozen=True, tag="pause"):
    """Wait."""

    seconds: WaitSeconds


class CheckQuery(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A prompt, and the right answer."""

    tokens: Tokens | list[int]
    held: dict[Annotated[str, Meta(pattern="^[a-z0-9.-]+(:[0-9]+)?$")], int]
    """Maps `worker`, or `worker:rank` for one rank, to the length in tokens of the longest prefix on all of its tiers together.
    Workers that are not listed hold no prefix."""
    lora: str | None = None
    salt: str | None = None
    tenant: str | None = None

    @property
    def ids(self) -> list[int]:
        """The token ids of the prompt."""
        if isinstance(self.tokens, list):
            return self.tokens
        first, count = self.tokens.run
        return list(range(first, first + count))


class Settle(_Step, frozen=True, tag="settle"):
    """Wait for at most `within` seconds until the answers are right. No verdict is given about these answers."""

    queries: list[CheckQuery]
    within: WaitSeconds


class Check(_Step, frozen=True, tag="check"):
    """Query for `within` seconds, or until all answers have been right for the scenario's `hold` seconds, and judge them.

    Every answer must be right, and no worker may be reported, except for the workers in the fields below.
    """

    within: WaitSeconds
    queries: list[CheckQuery] = []
    may_report: list[PlainName] = []
    """Workers whose state cannot be known from the events. The target may report them, but their answers must be right."""
    may_be_wrong: list[PlainName] = []
    """Workers whose right answers no reader can know. The answers may be wrong if the target reports these workers."""
    must_report: list[PlainName] = []
    """Workers about which the target must report a problem."""


PublishingStep = Store | Publish | Skip | Resend | Send
NetworkStep = Cut | Stall | HalfOpen | Heal | AwaitSubscriber
Step = Register | Unregister | PublishingStep | Restart | Stop | NetworkStep | Kill | Start | Pause | Settle | Check


class Scenario(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="target", tag="reader"):
    """A scenario: engines, steps that change them, and the right answers of a program that reads the engines' events."""

    version: Literal[2]
    """Version of this format."""
    name: PlainName
    title: str
    """Title of the scenario, in one phrase."""
    group: Literal["dialects", "healthy", "losses", "restarts", "bytes", "blocks", "registration"]
    rule: PlainName
    """The rule from which the right answers follow: a key of `rules.json`."""
    source: str
    """Source of the rule: a release with one of its files, or a document."""
    hold: WaitSeconds
    """Seconds for which the answers must stay right before a check accepts them."""
    subscribe: WaitSeconds
    """Maximum number of seconds until the target subscribes, for the first time or again."""
    engines: dict[PlainName, ScenarioEngine]
    steps: Annotated[list[Step], Meta(min_length=1)]
    forms: Forms = msgspec.field(default_factory=Forms)
    block_size: Annotated[int, Meta(ge=1)] = 16
    needs: list[Ability] = []

    def worker(self, engine: str) -> str:
        """The name of an engine's worker."""
        return self.engines[engine].worker or engine


class FeedBatches(_Step, frozen=True, tag="feed"):
    """Give the publisher batches. Batch n of an incarnation stores one block, number n, whose parent is block n - 1."""

    batches: Annotated[int, Meta(ge=1, le=100_000)]


class Subscribe(_Step, frozen=True, tag="subscribe"):
    """Connect a SUB socket, and wait until its connection is open."""

    reader: PlainName
    stalls: bool = False
    """Whether the socket has a short queue that is not read, as if the consumer hung."""


class SendRequest(_Step, frozen=True, tag="send-request"):
    """Send a message with the given frames from a DEALER socket to the replay endpoint, without waiting for a reply."""

    frames: list[HexText]


class RestartPublisher(_Step, frozen=True, tag="restart-publisher"):
    """Kill the publisher's process, and start a new process at the same endpoints."""


class EndPublisher(_Step, frozen=True, tag="end-publisher"):
    """End the input of the publisher, and wait until it has sent all batches and ended."""


class CheckLive(_Step, frozen=True, tag="check-live"):
    """Read until a reader has received the batches `first` to `last`, each once, in order and unchanged."""

    reader: PlainName
    first: int
    last: int
    within: WaitSeconds


class CheckReplay(_Step, frozen=True, tag="check-replay"):
    """Request all batches from `start` on. Consumers that apply the reply must hold the blocks that these batches store."""

    start: int
    within: WaitSeconds
    consumers: Annotated[int, Meta(ge=1, le=100)] = 1
    """Number of concurrent requests, each from its own socket."""
    delay: WaitSeconds = 0.0
    """Seconds from the requests until the consumers begin to read the replies."""


class CheckWatched(_Step, frozen=True, tag="check-watched"):
    """Give the publisher 10 batches if it accepts batches. Then read live batches, and compare them with their replay."""

    seconds: WaitSeconds


PublisherStep = (
    FeedBatches | Subscribe | SendRequest | RestartPublisher | EndPublisher | Pause | CheckLive | CheckReplay | CheckWatched
)


class PublisherScenario(
    Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="target", tag="publisher"
):
    """The batches that a publisher gets, and the batches that its consumers must receive."""

    version: Literal[2]
    name: PlainName
    title: str
    rule: PlainName
    source: str
    steps: Annotated[list[PublisherStep], Meta(min_length=1)]
    group: Literal["publishing"] = "publishing"
    buffer_steps: Annotated[int, Meta(ge=1)] = 10_000
    """Number of batches in the replay buffer."""
    needs: list[Literal["feed"]] = []
    """`feed` if the referee must be able to give the publisher batches."""


AnyScenario = Scenario | PublisherScenario


def block_hash(seed: int, prompt: int, place: int) -> int:
    """Return the hash of a block in an engine: `((seed * 2^32 + prompt + place) * 0x9E3779B97F4A7C15)` modulo 2^64."""
    return ((seed << 32) + prompt + place) * 0x9E3779B97F4A7C15 % (1 << 64)


class Macros:
    """Replaces macros and placeholders in the batches of one engine."""

    def __init__(self, forms: Forms, block_size: int, engine: ScenarioEngine) -> None:
        self._forms = forms
        self._block_size = block_size
        self._seed = engine.seed
        self._rank = engine.rank

    def payload(self, step: Publish, number: int) -> bytes:
        """Return the payload that a step publishes if the scenario has published `number` batches before."""
        if step.payload is not None:
            return bytes.fromhex(step.payload)
        time = 1_760_000_000.0 + number / 16  # each batch has its own time, so no two batches have equal bytes
        names = {"$time": time, "$milliseconds": int(time * 1000), "$rank": self._rank}
        if step.events is None:
            return msgspec.msgpack.encode(self.expand(step.batch, names))
        return msgspec.msgpack.encode(self.expand(self._forms.batch, {**names, "$events": self.expand(step.events, names)}))

    def expand(self, value: Any, names: Mapping[str, Any]) -> Any:
        """Replace all macros in a JSON value, and the placeholders that are keys of `names`, and return the result."""
        [expanded] = self._expand_all(value, names)
        return expanded

    def _expand_all(self, value: Any, names: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the values that replace a value in a list. A single `$store` can become several events."""
        match value:
            case str():
                yield names.get(value, value)
            case list():
                yield [expanded for item in value for expanded in self._expand_all(item, names)]
            case {"$store": [prompt, place, count], **changes}:
                for block in range(place, place + count):
                    yield self._store(prompt, block, changes)
            case {"$remove": [prompt, place, count], **changes}:
                hashes = [self._hash(prompt, block) for block in range(place, place + count)]
                yield self.expand(_merge_changes(self._forms.remove, changes), {"$hashes": hashes})
            case {"$clear": True, **changes}:
                yield self.expand(_merge_changes(self._forms.clear, changes), {})
            case dict():
                yield self._expand_object(value, names)
            case _:
                yield value

    def _expand_object(self, value: dict[str, Any], names: Mapping[str, Any]) -> Any:
        match value:
            case {"$tokens": [first, count]}:
                return list(range(first, first + count))
            case {"$hash": [prompt, place]}:
                return self._hash(prompt, place)
            case {"$hashes": [prompt, place, count]}:
                return [self._hash(prompt, block) for block in range(place, place + count)]
            case {"$hex": digits}:
                return bytes.fromhex(digits)
            case {"$msgpack": item}:
                return msgspec.msgpack.encode(self.expand(item, names))
        if unknown := [key for key in value if key.startswith("$")]:
            raise ConfigError(f"unknown macro {unknown[0]!r} with {value[unknown[0]]!r}")
        return {key: self.expand(item, names) for key, item in value.items()}

    def _store(self, prompt: int, place: int, changes: Mapping[Any, Any]) -> Any:
        size = changes.get("block_size", self._block_size)
        first, parent = prompt + place * size, self._hash(prompt, place - 1) if place else None
        names = {"$hash": self._hash(prompt, place), "$parent": parent, "$block_size": size}
        return self.expand(_merge_changes(self._forms.store, changes), {**names, "$tokens": list(range(first, first + size))})

    def _hash(self, prompt: int, place: int) -> int | bytes:
        number = block_hash(self._seed, prompt, place)
        if self._forms.hashes == "bytes":
            return bytes(24) + number.to_bytes(8, "big")
        return number - (1 << 64) if self._forms.hashes == "signed" and number >> 63 else number


def _merge_changes(form: Any, changes: Mapping[Any, Any]) -> Any:
    return {**form, **changes} if changes else form


def payloads(scenario: Scenario) -> list[list[bytes]]:
    """Return the payloads that each step publishes, in the order of the steps."""
    batches, number = list[list[bytes]](), 0
    macros = {name: Macros(scenario.forms, scenario.block_size, engine) for name, engine in scenario.engines.items()}
    for step in scenario.steps:
        published = list[bytes]()
        if isinstance(step, Publish):
            published = [macros[step.engine].payload(step, number)] * step.times
        elif isinstance(step, Store):
            first, count = step.blocks
            stores = [Publish(step.engine, [{"$store": [step.prompt, first + at, 1]}]) for at in range(count)]
            published = [macros[step.engine].payload(store, number + at) for at, store in enumerate(stores)]
        number += len(published)
        batches.append(published)
    return batches


def read_scenario(text: bytes | str, place: str = "scenario") -> AnyScenario:
    """Decode a scenario from JSON. Raise `ConfigError`, which names `place`, if the text does not have the format."""
    try:
        scenario: AnyScenario = msgspec.json.decode(text, type=AnyScenario)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"invalid {place}: {error}; the format is version {VERSION} of `kvevents.conform`") from error
    if isinstance(scenario, PublisherScenario):
        return scenario
    unknown = {name for step in scenario.steps if (name := getattr(step, "engine", None)) and name not in scenario.engines}
    if unknown:
        raise ConfigError(f"invalid {place}: steps name engines that `engines` does not contain: {', '.join(sorted(unknown))}")
    return scenario


def shipped_scenarios() -> Iterator[AnyScenario]:
    """Yield the scenarios of this package, sorted by the order of their groups in `GROUPS` and then by name."""
    folder = files("kvevents.conform") / "scenarios"
    scenarios = [read_scenario(file.read_bytes(), file.name) for file in folder.iterdir() if file.name.endswith(".json")]
    order = list(GROUPS)
    yield from sorted(scenarios, key=lambda scenario: (order.index(scenario.group), scenario.name))


def to_dialect(scenario: Scenario, release: Scenario) -> Scenario | None:
    """Return `scenario` with the forms and the reply shape that the scenario `release` has.

    Return None if these forms cannot express the scenario, because it contains whole batches, or fields that events of that
    release do not have. Payloads that are given as bytes are not changed.
    """
    for step in scenario.steps:
        if isinstance(step, Publish) and (step.batch is not None or not all(map(release.forms.can_express, step.events or ()))):
            return None
    shape = next(iter(release.engines.values())).reply_shape
    engines = {
        name: msgspec.structs.replace(engine, reply_shape=shape if engine.reply_shape == "topic" else engine.reply_shape)
        for name, engine in scenario.engines.items()
    }
    name = f"{scenario.name}.{release.name.removeprefix('dialect-')}"
    return msgspec.structs.replace(scenario, name=name, forms=release.forms, engines=engines)
