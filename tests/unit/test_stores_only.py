"""Tiers from which an engine announces no removals: blocks there count, and are not EXACT."""

from __future__ import annotations

import msgspec
import pytest

from kvevents import BlockStored, Source, Subscriber, Trust
from kvevents.errors import ConfigError
from kvevents.events import MEDIUM_CPU
from kvevents.index import PrefixIndex
from kvevents.routing import Router, policy
from kvevents.service.discovery.provider import parse_table
from kvevents.service.fleet.member import Member
from kvevents.service.settings import DnsTable
from kvevents.settings import convert
from kvevents.stream import RawBatch
from kvevents.testing import FakeTransport
from wire_cases import batch_of, make_store


def test_the_trust_of_a_stream_names_the_tiers_without_removals() -> None:
    transport = FakeTransport()
    engine = transport.engine("tcp://e:1", "tcp://e:2")
    source = Source(engine.endpoint, engine.replay_endpoint, name="e", stores_only=("cpu", "disk"))
    index = PrefixIndex()
    with Subscriber(source, transport=transport, clock=transport.clock, decode=False, sink=index) as subscriber:
        engine.publish(BlockStored([1], None, [1, 2], 2))
        engine.publish(BlockStored([2], 1, [3, 4], 2, medium=MEDIUM_CPU))
        while subscriber.receive(timeout=1) is not None:
            pass
        trust = subscriber.trust("e")
        assert trust == Trust.EXACT
        assert trust.inexact_tiers == ("cpu", "disk")
        assert str(trust) == "EXACT (without removals: cpu, disk)"
        assert subscriber.status("e").trust.inexact_tiers == ("cpu", "disk")
    (hit,) = index.match([1, 2, 3, 4])
    assert (hit.tiers["gpu"], hit.tiers["cpu"]) == (2, 4), "blocks on such a tier count"


def test_only_a_tier_without_removals_is_degraded() -> None:
    trust = Trust("EXACT", inexact_tiers=("cpu",))
    assert trust.of_tier("gpu") is trust
    assert trust.of_tier("cpu") == Trust.DEGRADED
    assert "cpu" in trust.of_tier("cpu").reason
    for state in ("DEGRADED", "STALE", "CONNECTING"):
        stream = Trust(state, "why", inexact_tiers=("cpu",))
        assert stream.of_tier("cpu") is stream
    assert trust.with_reason("why").inexact_tiers == ("cpu",)


@pytest.mark.parametrize("tier", ["gpu", "", "X" * 65, "A\n", "gpuu", "Disk", "CPU", "GPU"])
def test_an_invalid_tier_is_a_readable_error(tier: str) -> None:
    with pytest.raises(ConfigError, match="stores_only"):
        Source("tcp://e:1", stores_only=(tier,))
    with pytest.raises(ConfigError, match="expected a tuple, such as"):
        Source("tcp://e:1", stores_only=tier)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="stores_only"):
        parse_table(1, {"endpoint": "tcp://e:1", "model": "m", "stores_only": [tier]})
    with pytest.raises(ConfigError, match="stores_only"):
        parse_table(1, {"base_url": "http://e:1", "stores_only": [tier]})
    with pytest.raises(ConfigError, match="stores_only"):
        convert({"target": "http://engines:8000", "stores_only": [tier]}, DnsTable, "dns")


def test_stores_only_of_a_registration_appears_in_the_trust_of_the_member() -> None:
    table = parse_table(1, {"endpoint": "tcp://e:1", "model": "m", "ranks": 2, "stores_only": ["cpu"]})
    registrations = table.static_registrations()
    assert [each.source().stores_only for each in registrations] == [("cpu",), ("cpu",)]
    member = Member(registrations[0], "discovery", 0.0)
    member.update_trust(Trust.EXACT, 1.0)
    assert member.view().stores_only == ["cpu"]
    shown = msgspec.to_builtins(member.view())["trust"]
    assert (shown["state"], shown["reason_codes"]) == ("EXACT", ("stores-only",))
    assert "no removals are announced from cpu" in shown["reason"]
    assert member.is_caught_up
    member.update_trust(Trust("DEGRADED", "why"), 2.0)
    assert "stores-only" not in member.trust_status.reason_codes, "all of a DEGRADED worker is inexact anyway"


def test_stores_without_removals_stay_within_the_memory_limit() -> None:
    """At the limit, further blocks of that worker are refused and counted; nothing is evicted silently."""
    limit = 8 << 20
    index = PrefixIndex(memory_limit=limit)
    for seq in range(2_000):
        hashes = list(range(1 + seq * 256, 1 + (seq + 1) * 256))
        payload = batch_of(
            make_store(block_hashes=hashes, token_ids=[each % 50_000 for each in hashes], block_size=1, medium="CPU")
        )
        index.apply(RawBatch("a", 0, 0, seq, False, payload))
    assert index.stats().bytes <= limit
    assert index.worker("a").evicted > 0


def test_a_router_gives_less_weight_to_a_tier_without_removals() -> None:
    """Half of the prompt is in GPU memory and half in host memory, from which one of two engines announces no removals."""
    index = PrefixIndex()
    for name in ("a", "b"):
        index.apply(RawBatch(name, 0, 0, 0, False, batch_of(make_store(block_hashes=[1], token_ids=[1, 2], block_size=2))))
        more = make_store(block_hashes=[2], parent_block_hash=1, token_ids=[3, 4], block_size=2, medium="CPU")
        index.apply(RawBatch(name, 0, 0, 1, False, batch_of(more)))
    trusts = {("a", 0): Trust("EXACT", inexact_tiers=("cpu",)), ("b", 0): Trust.EXACT}
    router = Router(policy("prefix-aware"), index, trust=trusts.__getitem__, whole_prompt=True)
    for worker in trusts:
        router.add(worker)
    decision = router.route("r", [1, 2, 3, 4])
    assert decision.worker == ("b", 0)
    assert {one.worker: one.uncached for one in decision.scored} == {
        ("a", 0): pytest.approx(1 - (0.5 + 0.5 * 0.8 * 0.5)),
        ("b", 0): pytest.approx(1 - (0.5 + 0.5 * 0.8)),
    }
    trusts["a", 0] = Trust("DEGRADED", inexact_tiers=("cpu",))
    assert router.route("s", [1, 2, 3, 4]).scored[1].uncached == pytest.approx(1 - 0.5 * (0.5 + 0.5 * 0.8)), (
        "the weight is reduced only once"
    )
