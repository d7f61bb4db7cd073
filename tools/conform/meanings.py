"""Scenarios of what events mean."""

from __future__ import annotations

from collections.abc import Iterator

from kvevents.conform.scenario import CheckQuery, Tokens
from kvevents.events import BlockRemoved, BlockStored, Heartbeat
from tools.conform.script import ARRIVE_SECONDS, BLOCK, A, B, Play, Prompt, Script, unsalted


def _other_hashes(script: Script) -> None:
    second = script.engine("b", seed=2)
    script.follow(second)
    script.warm(A)
    second.store(A)
    second.remove(A, [8, 9])
    script.check()


def _middle(script: Script) -> None:
    engine = script.warm(A, 6)
    engine.remove(A, [2])
    script.check()
    engine.store(A, [2])
    engine.store(A, range(6, 10))
    script.check()


def _cleared(script: Script) -> None:
    engine = script.warm(A)
    engine.clear()
    script.ask(B)
    engine.store(B)
    script.check()


def _medium(name: str | None) -> Play:
    def play(script: Script) -> None:
        engine = script.engine()
        script.follow(engine)
        script.ask(A)
        engine.publish([engine.stored(A, place, medium=name) for place in range(10)])  # type: ignore[arg-type]
        script.check()

    return play


def _tiers(script: Script) -> None:
    """Blocks go to host memory, leave the device, and come back in part."""
    engine = script.warm(A)
    engine.store(A, medium="CPU")
    engine.remove(A, range(3, 10))
    script.check()
    engine.remove(A, range(8, 10), medium="CPU")
    script.check()
    engine.store(A, range(8, 9))
    script.check()


def _reannounced(script: Script) -> None:
    """vLLM's `kv_cache_report_mode=full`: a request that hits announces its blocks again. Then each is evicted, once."""
    engine = script.warm(A, 4)
    for place in range(4):
        engine.publish([engine.stored(A, place, group_idx=0)])  # as vLLM does: its block pool names the group
    script.settle(1.0)
    engine.remove(A, [3, 2, 1, 0])
    script.ask(B)
    engine.store(B)
    script.check()


def _two_copies(script: Script) -> None:
    """Two requests compute the same blocks at a time. One copy of each is evicted."""
    engine = script.warm(A, 4)
    engine.publish([engine.stored(A, place, group_idx=0) for place in range(4)])
    script.settle(1.0)
    event = engine.removed(A, [3, 2, 1, 0])
    for place in range(4):
        engine.stored(A, place)  # the other copy
    engine.publish([event])
    script.ask(B)
    engine.store(B)
    script.check()


def _heartbeats(script: Script) -> None:
    """Batches with the publisher's own digest, as a removal of no blocks with one more field (kvevents)."""
    engine = script.warm(A, 3)
    for place in range(3, 10):
        engine.publish([BlockRemoved([], heartbeat=Heartbeat("0123456789abcdef" * 2, 5.0))])
        engine.store(A, [place])
    script.check()


def _partial_tail(script: Script) -> None:
    """vLLM from 0.33 caches prompt tails inside a block of a hybrid model: a block of 8 tokens behind one of 16."""
    engine = script.engine()
    script.follow(engine)
    engine.publish([BlockStored([1], None, A.part(0), 16, medium="GPU")])
    engine.publish([BlockStored([2], 1, A.part(1)[:8], 8, medium="GPU")])
    script.check(queries=[CheckQuery(Tokens((A.first, 24)), {"a": 24})])


def _mixed_sizes(script: Script) -> None:
    """A block of 64 tokens behind one of 16."""
    engine = script.engine()
    script.follow(engine)
    engine.publish([BlockStored([1], None, A.part(0), 16, medium="GPU")])
    engine.publish([BlockStored([2], 1, list(range(A.first + 16, A.first + 80)), 64, medium="GPU")])
    script.check(queries=[CheckQuery(Tokens((A.first, 80)), {"a": 80})])


def _null_window(script: Script) -> None:
    """A report of hits names blocks of a sliding-window group that were evicted before: vLLM announces its null blocks."""
    engine = script.engine()
    script.follow(engine)
    full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 32}
    hashes = [A.name_of(place, 1) for place in range(4)]
    stores = [
        BlockStored(hashes, None, list(range(A.first, A.first + 64)), 16, medium="GPU", **group)  # type: ignore[arg-type]
        for group in (full, window)
    ]
    engine.publish(stores)
    engine.publish([BlockRemoved(hashes[:2], medium="GPU", group_idx=1)])
    short, whole = Tokens((A.first, 32)), Tokens((A.first, 64))
    script.check(ARRIVE_SECONDS, queries=[CheckQuery(short, {}), CheckQuery(whole, {"a": 64})])
    # Without a new prompt, an answer from before the batch arrived would pass.
    new = [
        BlockStored([B.name_of(0, 1)], None, list(range(B.first, B.first + 16)), 16, medium="GPU", **group)  # type: ignore[arg-type]
        for group in (full, window)
    ]
    engine.publish([*stores, *new])
    arrived = CheckQuery(Tokens((B.first, 16)), {"a": 16})
    script.check(queries=[CheckQuery(short, {}), CheckQuery(whole, {"a": 64}), arrived])


def _window(script: Script) -> None:
    """A hybrid model: what a sliding-window group has evicted ends a prefix that is too short to do without it."""
    engine = script.engine()
    script.follow(engine)
    full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 32}
    hashes = [A.name_of(place, 1) for place in range(6)]
    for group in (full, window):
        event = BlockStored(hashes, None, list(range(A.first, A.first + 96)), 16, medium="GPU", **group)  # type: ignore[arg-type]
        engine.publish([event])
    engine.publish([BlockRemoved(hashes[:3], medium="GPU", group_idx=1)])
    queries = [CheckQuery(Tokens((A.first, 96)), {"a": 96}), CheckQuery(Tokens((A.first, 64)), {})]
    script.check(queries=queries)


def _salt(script: Script) -> None:
    salted = Prompt(1, 10, salt="s1")
    engine = script.engine()
    script.follow(engine)
    script.ask(salted)
    script.ask(unsalted(salted), nothing=True)
    engine.store(salted)
    script.check()


def _lora(script: Script) -> None:
    adapted = Prompt(1, 10, lora="adapter-1")
    engine = script.engine()
    script.follow(engine)
    script.ask(adapted)
    script.ask(unsalted(adapted), nothing=True)
    script.ask(unsalted(adapted), nothing=True, lora="adapter-2")
    engine.store(adapted)
    script.check()


def _tenants(script: Script) -> None:
    engine = script.engine()
    script.follow(engine, tenant="a")
    script.ask(A, tenant="a")
    script.ask(A, nothing=True, tenant="b")
    engine.store(A)
    script.check()


def _ranks(script: Script) -> None:
    """Two data-parallel ranks of one worker, each with numbers of its own; one restarts."""
    first, second = script.engine("a0", worker="a"), script.engine("a1", worker="a", rank=1)
    for engine in (first, second):
        script.follow(engine)
    script.ask(A)
    for place in range(10):
        first.publish([first.stored(A, place)], rank=0)
        if place < 5:
            second.publish([second.stored(A, place)], rank=1)
    script.check()
    first.restart()
    first.await_subscriber()
    first.publish([first.stored(A, 0)], rank=0)
    script.settle(1.0)
    first.publish([first.stored(A, 1)], rank=0)
    script.check()


def _other_blocks(script: Script) -> None:
    prompt = Prompt(1, 5, block_size=2 * BLOCK)
    engine = script.engine()
    script.follow(engine)
    script.ask(prompt)
    engine.store(prompt)
    script.check()


def meanings() -> Iterator[tuple[Script, Play]]:
    for name, title, play, needs in (
        ("other-hashes", "two engines with different hashes for equal tokens; one evicts", _other_hashes, []),
        ("middle", "a block in the middle evicted, then stored again", _middle, []),
        ("cleared", "AllBlocksCleared, then another prompt", _cleared, []),
        ("medium-lower-case", "media in lower case (`gpu`)", _medium("gpu"), []),
        ("medium-none", "events without a medium", _medium(None), []),
        ("tiers", "blocks in host memory as well, evicted from either", _tiers, []),
        ("reannounced", "hits announced again (`kv_cache_report_mode=full`), then evicted once", _reannounced, []),
        ("two-copies", "blocks computed twice at a time, one copy of each evicted", _two_copies, []),
        ("heartbeats", "removals of no blocks with an unknown field", _heartbeats, []),
        ("partial-tail", "a block of 8 tokens behind one of 16 (vLLM 0.33, hybrid models)", _partial_tail, []),
        ("mixed-sizes", "a block of 64 tokens behind one of 16", _mixed_sizes, []),
        ("window", "a hybrid model whose sliding-window group has evicted", _window, []),
        ("window-null-blocks", "a report of hits that names evicted blocks of a window group", _null_window, []),
        ("other-block-size", "registered with blocks of 16 tokens, sends blocks of 32", _other_blocks, []),
        ("salt", "vLLM's cache salt; asked for with and without it", _salt, ["salt"]),
        ("lora", "an adapter's blocks; asked for with it, with another one, and without", _lora, ["lora"]),
        ("tenants", "tenant b asks for what tenant a holds", _tenants, ["tenants"]),
        ("ranks", "two ranks of one worker, one restarts", _ranks, ["ranks"]),
    ):
        yield Script(name, title, "blocks", needs=needs), play
