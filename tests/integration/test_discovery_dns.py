"""DNS names of several engines, resolved by a real DNS server on the loopback interface."""

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

from discovery_cases import ManualClock, await_in_time, start_next
from kvevents.errors import ConfigError, MissingDependencyError
from kvevents.service.discovery.dns import DnsProvider, DnsResolver, ResolveError
from kvevents.service.discovery.engines import EngineProvider
from kvevents.service.discovery.provider import Finding, Template

MODEL = Template(model="m")


class NameServer(asyncio.DatagramProtocol):
    """A DNS server that answers from `zone`, which maps name and type to lines of a zone file.

    With `rcode` every answer is that error; with `is_silent` the server does not answer.
    """

    def __init__(self) -> None:
        self.zone: dict[tuple[str, str], list[str]] = {}
        self.ttl = 30
        self.rcode = dns.rcode.NOERROR
        self.is_silent = False
        self.queries: list[tuple[str, str]] = []
        self.arrived = asyncio.Event()
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, kind = question.name.to_text(omit_final_dot=True).lower(), dns.rdatatype.to_text(question.rdtype)
        self.queries.append((name, kind))
        self.arrived.set()
        if self.is_silent:
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


def make_resolver(server: NameServer, seconds: float = 10, hosts: Path = Path("/nonexistent")) -> DnsResolver:
    return DnsResolver(("127.0.0.1",), server.port, seconds, hosts)


async def resolve(server: NameServer, target: str, template: Template = MODEL, hosts: Path = Path("/nonexistent")) -> Finding:
    findings = DnsProvider(target, template, make_resolver(server, hosts=hosts)).watch()
    found = await await_in_time(start_next(findings))
    await findings.aclose()
    return found


def list_endpoints(found: Finding) -> list[tuple[str, str]]:
    return [(each.label, each.endpoint) for each in found.registrations]


@pytest.mark.parametrize("target", ["engines.test:5557", "tcp://engines.test:5557"])
async def test_every_address_is_one_instance(server: NameServer, target: str) -> None:
    """An instance is named by address and port and has the fields of the template; instances are sorted."""
    server.zone["engines.test", "A"] = ["10.0.0.2", "10.0.0.1"]
    found = await resolve(server, target, Template(model="m", ranks=2, replay_endpoint="tcp://*:6557", tenant="t"))
    assert [(each.label, each.endpoint, each.replay_endpoint, each.tenant) for each in found.registrations] == [
        ("10.0.0.1:5557 rank 0", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:6557", "t"),
        ("10.0.0.1:5557 rank 1", "tcp://10.0.0.1:5558", "tcp://10.0.0.1:6558", "t"),
        ("10.0.0.2:5557 rank 0", "tcp://10.0.0.2:5557", "tcp://10.0.0.2:6557", "t"),
        ("10.0.0.2:5557 rank 1", "tcp://10.0.0.2:5558", "tcp://10.0.0.2:6558", "t"),
    ]


async def test_ipv6_addresses_are_used_only_without_ipv4_addresses(server: NameServer) -> None:
    """A host with both families is one engine; a host with only IPv6 addresses is found."""
    server.zone |= {("six.test", "AAAA"): ["fd00::1"], ("both.test", "A"): ["10.0.0.1"], ("both.test", "AAAA"): ["fd00::1"]}
    assert list_endpoints(await resolve(server, "six.test:1")) == [("[fd00::1]:1 rank 0", "tcp://[fd00::1]:1")]
    assert list_endpoints(await resolve(server, "both.test:1")) == [("10.0.0.1:1 rank 0", "tcp://10.0.0.1:1")]


async def test_every_srv_target_is_one_instance(server: NameServer) -> None:
    """It has the port and the name of the record: the pods of a StatefulSet keep their names if their addresses change."""
    server.zone["_kv._tcp.engines.test", "SRV"] = ["0 1 5557 pod-1.engines.test.", "0 1 5559 pod-0.engines.test."]
    assert list_endpoints(await resolve(server, "_kv._tcp.engines.test")) == [
        ("pod-0.engines.test:5559 rank 0", "tcp://pod-0.engines.test:5559"),
        ("pod-1.engines.test:5557 rank 0", "tcp://pod-1.engines.test:5557"),
    ]
    server.zone["_kv._tcp.none.test", "SRV"] = ["0 0 0 ."]
    assert "no SRV records" in (await resolve(server, "_kv._tcp.none.test")).faults[0]


async def test_an_http_target_becomes_one_provider_for_each_address(server: NameServer) -> None:
    """Each provider queries one engine over HTTP; the certificate of `https://` must be for the resolved name."""
    server.zone |= {("e.test", "A"): ["10.0.0.1"], ("_http._tcp.e.test", "SRV"): ["0 0 8000 pod.test."]}
    (found,) = (await resolve(server, "https://e.test:8000", Template(tenant="t"))).providers
    assert isinstance(found, EngineProvider)
    assert (found.base_url, found.template.tenant, found.http.server_name) == ("https://10.0.0.1:8000", "t", "e.test")
    (found,) = (await resolve(server, "http://_http._tcp.e.test", Template())).providers
    assert isinstance(found, EngineProvider)
    assert (found.base_url, found.http.server_name) == ("http://pod.test:8000", None)


async def test_the_hosts_file_and_plain_addresses_need_no_nameserver(server: NameServer, tmp_path: Path) -> None:
    """Names in the hosts file are not sent to the nameserver; only their IPv4 addresses are used if there are any."""
    hosts = tmp_path / "hosts"
    hosts.write_text("# engines.test\n10.0.0.9\tother Engines.Test # comment\n::1 engines.test\n10.0.0.8 engines.test\n")
    assert list_endpoints(await resolve(server, "engines.test:1", hosts=hosts)) == [
        ("10.0.0.9:1 rank 0", "tcp://10.0.0.9:1"),
        ("10.0.0.8:1 rank 0", "tcp://10.0.0.8:1"),
    ]
    assert list_endpoints(await resolve(server, "10.0.0.7:1")) == [("10.0.0.7:1 rank 0", "tcp://10.0.0.7:1")]
    assert list_endpoints(await resolve(server, "[fd00::1]:1")) == [("[fd00::1]:1 rank 0", "tcp://[fd00::1]:1")]
    assert server.queries == []


@pytest.mark.parametrize(("ttl", "random", "pause"), [(0, 0, 5), (30, 0, 30), (86_400, 0, 60), (30, 0.5, 28.5)])
async def test_a_name_is_resolved_again_when_the_ttl_is_over(server: NameServer, ttl: int, random: float, pause: float) -> None:
    """The pause is between 5 s and 60 s, randomly a little shorter; a finding is yielded only if it has changed."""
    server.zone["e.test", "A"] = ["10.0.0.1"]
    server.ttl = ttl
    steps = ManualClock(random)
    findings = DnsProvider("e.test:1", MODEL, make_resolver(server), clock=steps.clock).watch()
    await await_in_time(start_next(findings))
    next_finding = start_next(findings)
    assert await steps.step() == pause
    assert await steps.wait_for_sleep() == pause
    server.zone["e.test", "A"] = ["10.0.0.1", "10.0.0.2"]
    steps.end_sleep()
    assert len((await await_in_time(next_finding)).registrations) == 2
    await findings.aclose()


@pytest.mark.parametrize("rcode", [dns.rcode.SERVFAIL, dns.rcode.NXDOMAIN])
async def test_a_failure_is_reported_at_once_and_known_engines_stay_for_a_bounded_time(
    server: NameServer, rcode: dns.rcode.Rcode
) -> None:
    """A nameserver that fails or has lost its zone does not empty the index until `max_stale` seconds have passed."""
    server.zone["e.test", "A"] = ["10.0.0.1"]
    steps = ManualClock()
    findings = DnsProvider("e.test:1", MODEL, make_resolver(server), max_stale=100, clock=steps.clock).watch()
    good = await await_in_time(start_next(findings))
    next_finding = start_next(findings)
    assert await steps.wait_for_sleep() == 30
    server.rcode = rcode
    steps.end_sleep()
    failing = await await_in_time(next_finding)
    assert failing.registrations == good.registrations
    assert "the engines found before (1) stay for at most 100 s" in failing.faults[0]
    next_finding = start_next(findings)
    # One fault covers all failures. The finding would expire during the pause after 91.5 s, so it is dropped before that pause.
    assert [await steps.step() for _ in range(7)] == [0.5, 1, 2, 4, 8, 16, 30]
    expired = await await_in_time(next_finding)
    assert (expired.registrations, steps.time) == ((), 91.5)
    assert "stay" not in expired.faults[0]
    next_finding = start_next(findings)
    await steps.wait_for_sleep()
    server.rcode = dns.rcode.NOERROR
    steps.end_sleep()
    assert await await_in_time(next_finding) == good
    await findings.aclose()


async def test_a_name_that_does_not_resolve_is_retried_with_growing_pauses(server: NameServer) -> None:
    """One finding has a fault and no engines; the retries yield no further finding."""
    steps = ManualClock()
    findings = DnsProvider("gone.test:1", MODEL, make_resolver(server), clock=steps.clock).watch()
    assert "gone.test has no addresses" in (await await_in_time(start_next(findings))).faults[0]
    next_finding = start_next(findings)
    assert [await steps.step() for _ in range(3)] == [0.5, 1, 2]
    await steps.wait_for_sleep()
    assert not next_finding.done()
    next_finding.cancel()


async def test_a_nameserver_that_does_not_answer_times_out(server: NameServer) -> None:
    """The time is bounded for queries for addresses and for services."""
    server.is_silent = True
    impatient_resolver = make_resolver(server, seconds=0.05)
    with pytest.raises(ResolveError, match="no nameserver answers in time"):
        await await_in_time(impatient_resolver.addresses("e.test"))
    with pytest.raises(ResolveError, match="cannot be resolved"):
        await await_in_time(impatient_resolver.services("_kv._tcp." + "a" * 64))


async def test_cancelling_ends_a_pending_query(server: NameServer) -> None:
    """It does not wait for a nameserver that does not answer."""
    server.is_silent = True
    next_finding = start_next(DnsProvider("e.test:1", MODEL, make_resolver(server)).watch())
    await await_in_time(server.arrived.wait())
    next_finding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await await_in_time(next_finding)


NO_NAME, NO_SCHEME = "expected HOST:PORT", "expected tcp://"


@pytest.mark.parametrize(
    ("target", "expected"),
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
def test_an_invalid_target_is_rejected(target: str, expected: str) -> None:
    """The constructor raises an error with the target and the expected form."""
    with pytest.raises(ConfigError, match=re.escape(f"invalid DNS target {target!r}: {expected}")):
        DnsProvider(target, MODEL)


def test_a_model_is_required_unless_the_engines_are_queried() -> None:
    """The name of a provider contains its target."""
    with pytest.raises(ConfigError, match="model is missing"):
        DnsProvider("h:1")
    assert DnsProvider("http://h:1").name == "dns http://h:1"


def test_without_dnspython_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constructor raises the error, not the first lookup."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingDependencyError, match=r"kvevents\[service\]"):
        DnsProvider("h:1", MODEL)
