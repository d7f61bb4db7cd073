"""Names that stand for several engines, resolved by a real DNS server on the loopback interface."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest
import pytest_asyncio

from discovery_cases import Steps, soon, within
from kvevents.errors import ConfigError, MissingDependencyError
from kvevents.service.discovery.dns import DnsProvider, DnsResolver, ResolveError, Resolver
from kvevents.service.discovery.engines import EngineProvider
from kvevents.service.discovery.provider import Finding, Template

MODEL = Template(model="m")


class NameServer(asyncio.DatagramProtocol):
    """Answers from `zone`: by name and type, lines as in a zone file, all with one TTL. `rcode` fails all, `mute` is silent."""

    def __init__(self) -> None:
        self.zone: dict[tuple[str, str], list[str]] = {}
        self.ttl = 30
        self.rcode = dns.rcode.NOERROR
        self.mute = False
        self.asked: list[tuple[str, str]] = []
        self.arrived = asyncio.Event()
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, kind = question.name.to_text(omit_final_dot=True).lower(), dns.rdatatype.to_text(question.rdtype)
        self.asked.append((name, kind))
        self.arrived.set()
        if self.mute:
            return
        answer = dns.message.make_response(query)
        lines = self.zone.get((name, kind), [])
        if lines:
            answer.answer.append(dns.rrset.from_text(question.name, self.ttl, "IN", kind, *lines))
        known = any(name == each for each, _ in self.zone)
        answer.set_rcode(self.rcode if self.rcode or known else dns.rcode.NXDOMAIN)
        self.transport.sendto(answer.to_wire(), addr)

    @property
    def port(self) -> int:
        return int(self.transport.get_extra_info("sockname")[1])


@pytest_asyncio.fixture
async def server() -> AsyncIterator[NameServer]:
    loop = asyncio.get_running_loop()
    transport, found = await loop.create_datagram_endpoint(NameServer, ("127.0.0.1", 0), family=socket.AF_INET)
    yield found
    transport.close()


def resolver(server: NameServer, seconds: float = 10, hosts: Path = Path("/nonexistent")) -> DnsResolver:
    return DnsResolver(("127.0.0.1",), server.port, seconds, hosts)


async def resolve(server: NameServer, target: str, template: Template = MODEL, hosts: Path = Path("/nonexistent")) -> Finding:
    watched = DnsProvider(target, template, resolver(server, hosts=hosts)).watch()
    found = await within(soon(watched))
    await watched.aclose()
    return found


def endpoints(found: Finding) -> list[tuple[str, str]]:
    return [(each.label, each.endpoint) for each in found.registrations]


@pytest.mark.parametrize("target", ["engines.test:5557", "tcp://engines.test:5557"])
async def test_every_address_is_one_instance(server: NameServer, target: str) -> None:
    """Named by address and port, with all that the template says; in the same order whatever the nameserver's."""
    server.zone["engines.test", "A"] = ["10.0.0.2", "10.0.0.1"]
    found = await resolve(server, target, Template(model="m", ranks=2, replay_endpoint="tcp://*:6557", tenant="t"))
    assert [(each.label, each.endpoint, each.replay_endpoint, each.tenant) for each in found.registrations] == [
        ("10.0.0.1:5557 rank 0", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:6557", "t"),
        ("10.0.0.1:5557 rank 1", "tcp://10.0.0.1:5558", "tcp://10.0.0.1:6558", "t"),
        ("10.0.0.2:5557 rank 0", "tcp://10.0.0.2:5557", "tcp://10.0.0.2:6557", "t"),
        ("10.0.0.2:5557 rank 1", "tcp://10.0.0.2:5558", "tcp://10.0.0.2:6558", "t"),
    ]


async def test_ipv6_counts_where_there_is_no_ipv4(server: NameServer) -> None:
    """A host with both is one engine and would be counted twice; one with IPv6 alone is found."""
    server.zone |= {("six.test", "AAAA"): ["fd00::1"], ("both.test", "A"): ["10.0.0.1"], ("both.test", "AAAA"): ["fd00::1"]}
    assert endpoints(await resolve(server, "six.test:1")) == [("[fd00::1]:1 rank 0", "tcp://[fd00::1]:1")]
    assert endpoints(await resolve(server, "both.test:1")) == [("10.0.0.1:1 rank 0", "tcp://10.0.0.1:1")]


async def test_every_srv_target_is_one_instance(server: NameServer) -> None:
    """With the record's own port, under its stable name: a StatefulSet's pods keep theirs when their addresses change."""
    server.zone["_kv._tcp.engines.test", "SRV"] = ["0 1 5557 pod-1.engines.test.", "0 1 5559 pod-0.engines.test."]
    assert endpoints(await resolve(server, "_kv._tcp.engines.test")) == [
        ("pod-0.engines.test:5559 rank 0", "tcp://pod-0.engines.test:5559"),
        ("pod-1.engines.test:5557 rank 0", "tcp://pod-1.engines.test:5557"),
    ]
    server.zone["_kv._tcp.none.test", "SRV"] = ["0 0 0 ."]
    assert "no SRV records" in (await resolve(server, "_kv._tcp.none.test")).faults[0].sentence


async def test_engines_behind_a_name_can_be_asked_themselves(server: NameServer) -> None:
    """`http://` makes each address a provider; the certificate of `https://` is that of the name."""
    server.zone |= {("e.test", "A"): ["10.0.0.1"], ("_http._tcp.e.test", "SRV"): ["0 0 8000 pod.test."]}
    (found,) = (await resolve(server, "https://e.test:8000", Template(tenant="t"))).providers
    assert isinstance(found, EngineProvider)
    assert (found.base_url, found.template.tenant, found.http.server_name) == ("https://10.0.0.1:8000", "t", "e.test")
    (found,) = (await resolve(server, "http://_http._tcp.e.test", Template())).providers
    assert isinstance(found, EngineProvider)
    assert (found.base_url, found.http.server_name) == ("http://pod.test:8000", None)


async def test_the_hosts_file_and_plain_addresses_need_no_nameserver(server: NameServer, tmp_path: Path) -> None:
    """As everywhere else on a machine: what /etc/hosts says is not asked for; one family of it counts."""
    hosts = tmp_path / "hosts"
    hosts.write_text("# engines.test\n10.0.0.9\tother Engines.Test # comment\n::1 engines.test\n10.0.0.8 engines.test\n")
    assert endpoints(await resolve(server, "engines.test:1", hosts=hosts)) == [
        ("10.0.0.9:1 rank 0", "tcp://10.0.0.9:1"),
        ("10.0.0.8:1 rank 0", "tcp://10.0.0.8:1"),
    ]
    assert endpoints(await resolve(server, "10.0.0.7:1")) == [("10.0.0.7:1 rank 0", "tcp://10.0.0.7:1")]
    assert endpoints(await resolve(server, "[fd00::1]:1")) == [("[fd00::1]:1 rank 0", "tcp://[fd00::1]:1")]
    assert server.asked == []


@pytest.mark.parametrize(("ttl", "random", "pause"), [(0, 0, 5), (30, 0, 30), (86_400, 0, 60), (30, 0.5, 28.5)])
async def test_it_resolves_again_when_the_ttl_is_over(server: NameServer, ttl: int, random: float, pause: float) -> None:
    """Bounded below and above, a little early at random; a finding is yielded only when something changed."""
    server.zone["e.test", "A"] = ["10.0.0.1"]
    server.ttl = ttl
    steps = Steps(random)
    watched = DnsProvider("e.test:1", MODEL, resolver(server), clock=steps.clock).watch()
    await within(soon(watched))
    following = soon(watched)
    assert await steps.step() == pause
    assert await steps.paused() == pause
    server.zone["e.test", "A"] = ["10.0.0.1", "10.0.0.2"]
    steps.go()
    assert len((await within(following)).registrations) == 2
    await watched.aclose()


@pytest.mark.parametrize("rcode", [dns.rcode.SERVFAIL, dns.rcode.NXDOMAIN])
async def test_a_failure_is_reported_at_once_and_its_engines_stay_for_a_bounded_time(
    server: NameServer, rcode: dns.rcode.Rcode
) -> None:
    """A nameserver that is away, or has just lost its zone, does not empty the index; but not for ever."""
    server.zone["e.test", "A"] = ["10.0.0.1"]
    steps = Steps()
    watched = DnsProvider("e.test:1", MODEL, resolver(server), max_stale=100, clock=steps.clock).watch()
    good = await within(soon(watched))
    following = soon(watched)
    assert await steps.paused() == 30
    server.rcode = rcode
    steps.go()
    failing = await within(following)
    assert failing.registrations == good.registrations
    assert failing.faults[0].subject == "e.test"
    assert "the engines found before (1) stay for at most 100 s" in failing.faults[0].sentence
    following = soon(watched)
    # One fault for all of it; it would be too old in the pause after 91.5 s, so it goes at its beginning.
    assert [await steps.step() for _ in range(7)] == [0.5, 1, 2, 4, 8, 16, 30]
    expired = await within(following)
    assert (expired.registrations, steps.time) == ((), 91.5)
    assert "stay" not in expired.faults[0].sentence
    following = soon(watched)
    await steps.paused()
    server.rcode = dns.rcode.NOERROR
    steps.go()
    assert await within(following) == good
    await watched.aclose()


async def test_a_name_that_never_resolves_is_asked_for_with_growing_pauses(server: NameServer) -> None:
    """One fault, no engines."""
    steps = Steps()
    watched = DnsProvider("gone.test:1", MODEL, resolver(server), clock=steps.clock).watch()
    assert "gone.test has no addresses" in (await within(soon(watched))).faults[0].sentence
    following = soon(watched)
    assert [await steps.step() for _ in range(3)] == [0.5, 1, 2]
    await steps.paused()
    assert not following.done()
    following.cancel()


async def test_a_silent_nameserver_is_given_up(server: NameServer) -> None:
    """After a bounded time, whatever it is asked."""
    server.mute = True
    asker: Resolver = resolver(server, seconds=0.05)
    with pytest.raises(ResolveError, match="no nameserver answers in time"):
        await within(asker.addresses("e.test"))
    with pytest.raises(ResolveError, match="cannot be resolved"):
        await within(asker.services("_kv._tcp." + "a" * 64))


async def test_cancelling_ends_it_in_the_middle_of_a_question(server: NameServer) -> None:
    """The end does not wait for a nameserver that does not answer."""
    server.mute = True
    following = soon(DnsProvider("e.test:1", MODEL, resolver(server)).watch())
    await within(server.arrived.wait())
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await within(following)


NO_NAME, NO_SCHEME = "expected HOST:PORT", "expected tcp://"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("", NO_NAME),
        ("engines.test", NO_NAME),
        ("engines.test:0", NO_NAME),
        ("engines.test:65536", NO_NAME),
        ("engines.test:x", NO_NAME),
        (":5557", NO_NAME),
        ("udp://h:1", NO_SCHEME),
        ("tcp://h", NO_NAME),
    ],
)
def test_an_invalid_target_is_refused(target: str, says: str) -> None:
    """When it is written, with the target and what it should look like."""
    with pytest.raises(ConfigError, match=re.escape(f"invalid DNS target {target!r}: {says}")):
        DnsProvider(target, MODEL)


def test_a_model_is_needed_where_engines_are_not_asked() -> None:
    """And only there; the provider is called by its target."""
    with pytest.raises(ConfigError, match="model is missing"):
        DnsProvider("h:1")
    assert DnsProvider("http://h:1").name == "dns http://h:1"


def test_without_dnspython_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a traceback from the depths of the first lookup."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingDependencyError, match=r"kvevents\[service\]"):
        DnsProvider("h:1", MODEL)
