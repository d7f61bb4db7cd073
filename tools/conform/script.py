"""Records a scenario: what engines do becomes steps with bytes, and what they hold becomes the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from typing import Any, Final

import msgspec

from kvevents.conform import scenario as steps
from kvevents.conform.scenario import CheckQuery, Scenario, Tokens
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvevents.wire import Dialect, dialect_for, encode_batch

BLOCK: Final = 16
FIRST_TS: Final = 1_760_000_000.0
"""Timestamp of the first batch of a scenario. Each further one is 1/16 s later, so that no two batches have the same bytes."""
ARRIVE_SECONDS: Final = 15.0
"""Time until what was sent without any fault is known."""
SHORTEST_RUN: Final = 4


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens that no prompt of another number has. With a salt or an adapter it is another prompt, of the same tokens."""

    number: int
    blocks: int
    salt: str | None = None
    lora: str | None = None
    block_size: int = BLOCK

    @property
    def first(self) -> int:
        return self.number * 10_000

    def part(self, place: int) -> list[int]:
        """Tokens of one block."""
        begin = self.first + place * self.block_size
        return list(range(begin, begin + self.block_size))

    def name_of(self, place: int, seed: int) -> int:
        """The hash of a block in an engine; another engine, with another seed, has another one."""
        known = repr((seed, self.number, self.block_size, self.salt, self.lora, place)).encode()
        return int.from_bytes(blake2b(known, digest_size=8).digest(), "big")

    def query(self, held: dict[str, int], **fields: Any) -> CheckQuery:
        """The question for this prompt, in its namespace unless `fields` say otherwise."""
        asked = {"lora": self.lora, "salt": self.salt, **fields}
        return CheckQuery(Tokens((self.first, self.blocks * self.block_size)), held, **asked)


A: Final = Prompt(1, 10)
B: Final = Prompt(2, 10)
C: Final = Prompt(3, 5)
D: Final = Prompt(4, 5)


def to_json(value: Any) -> Any:
    """A decoded msgpack value, with runs of tokens and bytes as scenarios have them."""
    if isinstance(value, bytes):
        return {"$hex": value.hex()}
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) >= SHORTEST_RUN and isinstance(value[0], int) and value == list(range(value[0], value[0] + len(value))):
        return {"$tokens": [value[0], len(value)]}
    return [to_json(item) for item in value]


class Engine:
    """An engine of a script, and what it holds: the truth."""

    def __init__(self, script: Script, name: str, settings: steps.ScenarioEngine, dialect: Dialect, seed: int) -> None:
        self.name = name
        self.settings = settings
        self._script = script
        self._dialect = dialect
        self._seed = seed
        self._held: set[tuple[int, str]] = set()
        self.next = 0
        """Number of the next batch."""

    # --- what it announces

    def store(self, prompt: Prompt, blocks: Iterable[int] | None = None, *, lost: bool = False, medium: str = "GPU") -> None:
        """Compute some blocks of a prompt, all by default, with one batch for each."""
        for place in range(prompt.blocks) if blocks is None else blocks:
            self.publish([self.stored(prompt, place, medium=medium)], lost=lost)

    def stored(self, prompt: Prompt, place: int, *, medium: str = "GPU", **fields: Any) -> BlockStored:
        """The event for one block, which is held from now on."""
        own = prompt.name_of(place, self._seed)
        self._held.add((own, medium))
        parent = prompt.name_of(place - 1, self._seed) if place else None
        if prompt.lora is not None:
            fields |= {"lora_name": prompt.lora, "lora_id": 1}
        if prompt.salt is not None and not place:  # vLLM `v1/core/kv_cache_utils.py`: an extra key of the first block alone
            fields |= {"extra_keys": [(prompt.salt,)]}
        return BlockStored([own], parent, prompt.part(place), prompt.block_size, **{"medium": medium, **fields})

    def remove(self, prompt: Prompt, places: Iterable[int], *, lost: bool = False, medium: str = "GPU") -> None:
        """Evict some blocks of a prompt, in one batch."""
        self.publish([self.removed(prompt, places, medium=medium)], lost=lost)

    def removed(self, prompt: Prompt, places: Iterable[int], *, medium: str = "GPU", **fields: Any) -> BlockRemoved:
        hashes = [prompt.name_of(place, self._seed) for place in places]
        self._held -= {(each, medium) for each in hashes}
        return BlockRemoved(hashes, medium=medium, **fields)

    def clear(self) -> None:
        """Evict everything."""
        self._held.clear()
        self.publish([AllBlocksCleared()])

    def publish(self, events: Sequence[Any], *, lost: bool = False, rank: int | None = 0) -> None:
        """One batch of any events."""
        payload = encode_batch(EventBatch(self._script.now(), list(events), rank), self._dialect)
        batch = to_json(msgspec.msgpack.decode(payload))
        assert steps.expand(batch) == msgspec.msgpack.decode(payload)
        self.publish_json(batch, lost=lost)

    def publish_json(self, batch: Any, *, lost: bool = False, times: int = 1) -> None:
        """A batch as a JSON value."""
        self.next += times
        self._script.add(steps.Publish(self.name, batch=batch, lost=lost, times=times))

    def publish_bytes(self, payload: bytes) -> None:
        """A payload of any bytes, with the next number."""
        self.next += 1
        self._script.add(steps.Publish(self.name, payload=payload.hex()))

    def send(self, frames: list[bytes]) -> None:
        """A message that takes no number."""
        self._script.add(steps.Send(self.name, [frame.hex() for frame in frames]))

    def resend(self, seq: int) -> None:
        self._script.add(steps.Resend(self.name, seq))

    def skip(self) -> None:
        self.next += 1
        self._script.add(steps.Skip(self.name))

    def heartbeat(self) -> None:
        """A batch without events."""
        self.publish([])

    # --- what is true

    def holds(self, prompt: Prompt) -> int:
        """Tokens of the longest prefix, on whatever medium."""
        held = {known for known, _ in self._held}
        missing = (place for place in range(prompt.blocks) if prompt.name_of(place, self._seed) not in held)
        return next(missing, prompt.blocks) * prompt.block_size

    # --- its process

    def restart(self) -> None:
        self._held.clear()
        self.next = 0
        self._script.add(steps.Restart(self.name))

    def stop(self) -> None:
        self._held.clear()
        self._script.add(steps.Stop(self.name))

    def await_subscriber(self) -> None:
        self._script.add(steps.AwaitSubscriber(self.name))


class Script:
    """A scenario that is being recorded."""

    def __init__(self, name: str, title: str, group: str, *, needs: Sequence[str] = (), dialect: str = "vllm-latest") -> None:
        self._scenario = Scenario(1, name, title, group, {}, [], needs=sorted(needs))  # type: ignore[arg-type]
        engine, _, release = dialect.partition("-")
        self.dialect = dialect_for(engine, release)
        self._engines: dict[str, Engine] = {}
        self._asked: list[tuple[Prompt, dict[str, Any], bool]] = []
        self._clock = count()

    def now(self) -> float:
        return FIRST_TS + next(self._clock) / 16

    def add(self, step: Any) -> None:
        self._scenario.steps.append(step)

    def engine(self, name: str = "a", *, seed: int = 1, dialect: str | None = None, **settings: Any) -> Engine:
        """An engine, whose replies have the shape of its release."""
        found = self.dialect if dialect is None else dialect_for(*dialect.split("-", 1))
        settings.setdefault("reply_shape", "topic" if found.has_replay_topic else "no-topic")
        made = self._engines[name] = Engine(self, name, steps.ScenarioEngine(**settings), found, seed)
        return made

    def follow(self, engine: Engine, **fields: Any) -> None:
        self.add(steps.Register(engine.name, **fields))

    def warm(self, prompt: Prompt, blocks: int | None = None, **settings: Any) -> Engine:
        """An engine that holds the beginning of a prompt, which the target knows."""
        engine = self.engine(**settings)
        self.follow(engine)
        self.ask(prompt)
        engine.store(prompt, range(prompt.blocks if blocks is None else blocks))
        self.check(ARRIVE_SECONDS)
        return engine

    def ask(self, *prompts: Prompt, nothing: bool = False, **fields: Any) -> None:
        """Ask for prompts from now on. `nothing`: no worker holds anything of them."""
        self._asked += [(prompt, fields, nothing) for prompt in prompts]

    def queries(self) -> list[CheckQuery]:
        """The questions, with what the engines hold now."""
        return [prompt.query({} if nothing else self._holders(prompt), **fields) for prompt, fields, nothing in self._asked]

    def _holders(self, prompt: Prompt) -> dict[str, int]:
        held: dict[str, int] = {}
        ranked = len(self._engines) > len({each.settings.worker or each.name for each in self._engines.values()})
        for engine in self._engines.values():
            tokens, worker = engine.holds(prompt), engine.settings.worker or engine.name
            held[worker] = max(held.get(worker, 0), tokens)
            if ranked:
                held[f"{worker}:{engine.settings.rank}"] = tokens
        return held

    def check(self, within: float = 8.0, *, reports: Sequence[str] = (), queries: Sequence[CheckQuery] | None = None) -> None:
        self.add(steps.Check(self.queries() if queries is None else list(queries), list(reports), within))

    def settle(self, within: float = 5.0) -> None:
        self.add(steps.Settle(self.queries(), within))

    def pause(self, seconds: float = 1.0) -> None:
        self.add(steps.Pause(seconds))

    def scenario(self) -> Scenario:
        """What was recorded."""
        return msgspec.structs.replace(self._scenario, engines={name: each.settings for name, each in self._engines.items()})


def unsalted(prompt: Prompt) -> Prompt:
    """The same tokens without salt or adapter."""
    return replace(prompt, salt=None, lora=None)


Play = Callable[[Script], None]
"""Records what happens in a scenario."""
