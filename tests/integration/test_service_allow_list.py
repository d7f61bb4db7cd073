"""Tests of the allow-list of endpoints for registrations over HTTP: notations, resolved names and patterns."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

import pytest
import zmq
from hypothesis import example, given
from hypothesis import strategies as st

from kvevents.errors import ConfigError, UsageError
from kvevents.service.access import Address
from kvevents.service.allow_list import EndpointAllowList, EndpointRefusedError

DEFAULT = EndpointAllowList()
OPEN = EndpointAllowList(["tcp://0.0.0.0/0:*", "tcp://[::/0]:*"])


def allows(allow_list: EndpointAllowList, endpoint: str, addresses: Iterable[str | Address] | None = None) -> bool:
    try:
        allow_list.check(endpoint, addresses)
    except EndpointRefusedError:
        return False
    return True


def endpoint_of(address: Address, port: int = 5557) -> str:
    return f"tcp://[{address}]:{port}" if address.version == 6 else f"tcp://{address}:{port}"


# --- notations --------------------------------------------------------------------------------------------------------------

HOSTILE = [
    # One number, hexadecimal, octal, parts left out: inet_aton reads them all, and so does libzmq.
    "tcp://2130706433:5557",
    "tcp://0x7f000001:5557",
    "tcp://0x7f.1:5557",
    "tcp://0X7F.0.0.0x1:5557",
    "tcp://0177.0.0.1:5557",
    "tcp://127.1:5557",
    "tcp://127.0.1:5557",
    "tcp://127.0.0.01:5557",
    "tcp://0:5557",
    "tcp://0x:5557",
    "tcp://127.0.0.1.:5557",
    "tcp://foo.1:5557",
    "tcp://foo.0x1:5557",
    "tcp://127.0.0.256:5557",
    # Source and target, several endpoints, text after the port.
    "tcp://127.0.0.1:9;127.0.0.1:5557",
    "tcp://10.0.0.1;169.254.169.254:80",
    "tcp://10.0.0.1:1;tcp://8.8.8.8:1",
    "tcp://10.0.0.1:1,tcp://8.8.8.8:1",
    "tcp://10.0.0.1:5557abc",
    "tcp://10.0.0.1:5557/x",
    "tcp://10.0.0.1:5557?x",
    "tcp://10.0.0.1:5557#8.8.8.8",
    # Users, zones, brackets.
    "tcp://10.0.0.1@8.8.8.8:80",
    "tcp://user:password@10.0.0.1:80",
    "tcp://10.0.0.1%lo:5557",
    "tcp://[fe80::1%eth0]:5557",
    "tcp://[::1%lo]:5557",
    "tcp://[127.0.0.1]:5557",
    "tcp://[localhost]:5557",
    "tcp://[[::1]]:5557",
    "tcp://[]:5557",
    "tcp://[::1]5557",
    "tcp://[::1]:5557]:1",
    "tcp://::1:5557",
    "tcp://fd00::1:5557",
    # Ports.
    "tcp://10.0.0.1",
    "tcp://10.0.0.1:",
    "tcp://10.0.0.1:0",
    "tcp://10.0.0.1:*",
    "tcp://10.0.0.1:!",
    "tcp://10.0.0.1:05557",
    "tcp://10.0.0.1:+5557",
    "tcp://10.0.0.1:-1",
    "tcp://10.0.0.1:0x50",
    "tcp://10.0.0.1:65536",
    "tcp://10.0.0.1:99999",
    "tcp://10.0.0.1:\u0665\u0665\u0665\u0667",
    "tcp://10.0.0.1:5_557",
    # Invalid hosts.
    "tcp://:5557",
    "tcp://*:5557",
    "tcp://*.example:5557",
    "tcp://.:5557",
    "tcp://a..b:5557",
    "tcp://-a:5557",
    "tcp://a-:5557",
    "tcp://a/b:5557",
    "tcp://10.0.0.0/8:5557",
    "tcp://%31%30.0.0.1:5557",
    "tcp://" + "a" * 64 + ":5557",
    "tcp://" + ".".join(["a" * 60] * 5) + ":5557",
    "tcp://" + "a." * 400 + "a:5557",
    # Characters.
    "tcp://\uff11\uff12\uff17.0.0.1:5557",
    "tcp://127\u30020\u30020\u30021:5557",
    "tcp://loc\u00adalhost:5557",
    "tcp://localhost\0.example:5557",
    "tcp://localhost\n:5557",
    "tcp://local host:5557",
    " tcp://localhost:5557",
    "tcp://localhost:5557 ",
    "tcp://localhost:5557\n",
    "tcp://localhost\t:5557",
    # Transports.
    "",
    "tcp",
    "tcp:",
    "tcp://",
    "tcp:/localhost:5557",
    "tcp//localhost:5557",
    "localhost:5557",
    "TCP://localhost:5557",
    "Tcp://localhost:5557",
    "tcp6://localhost:5557",
    "udp://10.0.0.1:5557",
    "pgm://10.0.0.1;239.0.0.1:5557",
    "epgm://lo;239.0.0.1:5557",
    "ws://localhost:5557",
    "vmci://1:5557",
    "tipc://{1,2,3}",
    "http://169.254.169.254/latest",
    "file:///etc/passwd",
    "ipc:///run/engines/a",
    "ipc://@abstract",
    "ipc://*",
    "inproc://events",
]


@pytest.mark.parametrize("endpoint", HOSTILE, ids=repr)
def test_hostile_notations_are_refused(endpoint: str) -> None:
    """They are refused even if every address is allowed, with allowed resolved addresses."""
    for allow_list in (DEFAULT, OPEN):
        assert not allows(allow_list, endpoint)
        assert not allows(allow_list, endpoint, ["127.0.0.1"])


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "0177.0.0.1", "127.1", "127.0.0.1:0;127.0.0.1", "127.0.0.1%lo"])
def test_libzmq_connects_to_loopback_by_hostile_notations(host: str) -> None:
    """These notations are in the table because a socket reaches the loopback address with them."""
    with zmq.Context() as context, context.socket(zmq.SUB) as client, socket.create_server(("127.0.0.1", 0)) as server:
        client.linger = 0
        server.settimeout(20)
        client.connect(f"tcp://{host}:{server.getsockname()[1]}")
        server.accept()[0].close()


@given(st.text(alphabet=st.sampled_from("tcpiro:/[]0123456789abx.*;@%-_~ \n"), max_size=40))
@example("tcp://a:1")
def test_any_text_is_accepted_or_refused_without_another_error(text: str) -> None:
    """`check` accepts or refuses any text, and an accepted endpoint has one host and one port."""
    for endpoint in (text, f"tcp://{text}", f"ipc://{text}"):
        if allows(OPEN, endpoint):
            assert re.fullmatch(r"tcp://([a-z0-9._-]+|\[[0-9a-f:.]+\]):[1-9][0-9]{0,4}", endpoint)


# --- the default ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:5557",
        "tcp://127.8.9.10:1",
        "tcp://[::1]:65535",
        "tcp://10.1.2.3:5557",
        "tcp://172.16.0.1:5557",
        "tcp://172.31.255.255:5557",
        "tcp://192.168.1.1:5557",
        "tcp://100.64.0.1:5557",
        "tcp://[fd12:3456::1]:5557",
        "tcp://[::ffff:10.0.0.1]:5557",
        "tcp://[::FFFF:0a00:0001]:5557",
    ],
)
def test_private_addresses_are_allowed_by_default(endpoint: str) -> None:
    """These are loopback, private and carrier-grade NAT addresses, also as IPv4-mapped IPv6."""
    assert allows(DEFAULT, endpoint)


@pytest.mark.parametrize(
    "address",
    [
        *("8.8.8.8", "172.15.255.255", "172.32.0.0", "100.63.255.255", "100.128.0.0", "192.169.0.1", "11.0.0.0"),
        *("2001:db8::1", "::ffff:8.8.8.8", "fbff::1", "fec0::1"),
    ],
)
def test_public_addresses_need_a_pattern(address: str) -> None:
    """This includes reserved addresses."""
    endpoint = endpoint_of(ipaddress.ip_address(address))
    assert not allows(DEFAULT, endpoint)
    assert not allows(DEFAULT, "tcp://engine:5557", [address])
    assert allows(OPEN, endpoint)


NEVER = [
    *(
        "169.254.169.254",
        "169.254.170.2",
        "169.254.0.1",
        "224.0.0.1",
        "239.255.255.255",
        "255.255.255.255",
        "0.0.0.0",  # noqa: S104 - must be refused
        "0.1.2.3",
    ),
    *("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"),
    *("fe80::1", "febf::1", "ff02::1", "::", "::ffff:169.254.169.254", "::ffff:0.0.0.0"),
    *("64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1"),
]


@pytest.mark.parametrize("address", NEVER)
def test_forbidden_addresses_need_their_own_pattern(address: str) -> None:
    """Only a pattern for exactly that address allows link-local, metadata, multicast, broadcast and unspecified addresses."""
    endpoint = endpoint_of(ipaddress.ip_address(address))
    allow_list = EndpointAllowList(
        ["tcp://0.0.0.0/0:*", "tcp://[::/0]:*", "tcp://engine:*", "tcp://169.254.0.0/16:*", "tcp://[fe80::/10]:*"]
    )
    for each_list in (DEFAULT, allow_list):
        assert not allows(each_list, endpoint)
        assert not allows(each_list, "tcp://engine:5557", [address])
    real = ipaddress.ip_address(address)
    unmapped = (real.ipv4_mapped if isinstance(real, ipaddress.IPv6Address) else None) or real
    exact = EndpointAllowList([endpoint_of(unmapped)])
    assert allows(exact, endpoint)
    assert not allows(exact, endpoint_of(unmapped, 5558))
    assert not allows(
        exact,
        endpoint_of(ipaddress.ip_address(int(unmapped) ^ 1 if unmapped.version == 4 else (int(unmapped) ^ 1).to_bytes(16))),
    )


def test_every_address_of_a_name_is_checked() -> None:
    """`check` accepts the name, and one address that is not allowed refuses it."""
    for name in ("engine", "ENGINE.prod.svc.cluster.local", "engine_1", "a.b-c.d", "engine."):
        assert allows(DEFAULT, f"tcp://{name}:5557")
        assert allows(DEFAULT, f"tcp://{name}:5557", ["10.0.0.1", "fd00::1", "::ffff:127.0.0.1"])
        assert not allows(DEFAULT, f"tcp://{name}:5557", ["10.0.0.1", "8.8.8.8"])
        assert not allows(DEFAULT, f"tcp://{name}:5557", ["fe80::1%eth0"])
        assert not allows(DEFAULT, f"tcp://{name}:5557", [])


# --- patterns ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "matching", "not_matching"),
    [
        ("tcp://engine:5557", ["tcp://engine:5557", "tcp://ENGINE.:5557"], ["tcp://engine:5558", "tcp://engine2:5557"]),
        ("tcp://Engine.:5557", ["tcp://engine:5557"], ["tcp://my.engine:5557"]),
        (
            "tcp://*.svc:5000-6000",
            ["tcp://a.svc:5000", "tcp://a.b.svc:6000"],
            ["tcp://svc:5000", "tcp://a.svc:6001", "tcp://asvc:5000"],
        ),
        ("tcp://8.8.8.0/24:*", ["tcp://8.8.8.8:1", "tcp://8.8.8.255:65535"], ["tcp://8.8.9.0:1", "tcp://10.0.0.1:1"]),
        ("tcp://8.8.8.8:53", ["tcp://8.8.8.8:53"], ["tcp://8.8.8.8:54", "tcp://8.8.8.9:53"]),
        ("tcp://[2001:db8::/32]:*", ["tcp://[2001:db8:1::]:1"], ["tcp://[2001:db9::]:1"]),
        ("tcp://[2001:db8::1]:1", ["tcp://[2001:db8:0:0::1]:1"], ["tcp://[2001:db8::2]:1"]),
        ("tcp://8.8.0.0/16:*", ["tcp://[::ffff:8.8.1.1]:1"], ["tcp://[::8.8.1.1]:1"]),
        (
            "ipc:///run/engines/*",
            ["ipc:///run/engines/a"],
            ["ipc:///run/engines/a/b", "ipc:///run/engines/", "ipc:///run/engines"],
        ),
        (
            "ipc:///run/engines/*",
            ["ipc:///run/engines/..a"],
            ["ipc:///run/engines/..", "ipc:///run/engines/.", "ipc://run/engines/a"],
        ),
        (
            "ipc:///run/*/kv",
            ["ipc:///run/a/kv"],
            ["ipc:///run/a/b/kv", "ipc:///run/../kv", "ipc:///run//kv", "inproc:///run/a/kv"],
        ),
        ("inproc://kv-*", ["inproc://kv-1"], ["inproc://kv", "ipc://kv-1", "inproc://kv-/1"]),
    ],
)
def test_a_pattern_allows_only_the_endpoints_that_match_it(pattern: str, matching: list[str], not_matching: list[str]) -> None:
    """Each pattern matches its endpoints and replaces the default."""
    allow_list = EndpointAllowList([pattern])
    assert [endpoint for endpoint in matching if not allows(allow_list, endpoint)] == []
    assert [endpoint for endpoint in not_matching if allows(allow_list, endpoint)] == []
    assert not allows(allow_list, "tcp://127.0.0.1:5557")


def test_a_pattern_for_a_name_allows_all_public_addresses() -> None:
    """A name without a pattern must resolve to addresses that a pattern allows."""
    allow_list = EndpointAllowList(["tcp://engine.example:5557", "tcp://10.0.0.0/8:6000"])
    assert allows(allow_list, "tcp://engine.example:5557", ["8.8.8.8", "10.0.0.1"])
    assert not allows(allow_list, "tcp://engine.example:5557", ["169.254.169.254"])
    assert allows(allow_list, "tcp://other.example:6000", ["10.0.0.1"])
    assert not allows(allow_list, "tcp://other.example:6000", ["8.8.8.8"])
    assert not allows(allow_list, "tcp://other.example:5557")
    assert not allows(EndpointAllowList(["tcp://engine.example:5557"]), "tcp://other.example:5557")


def test_resolved_addresses_are_ignored_for_paths() -> None:
    """Paths and inproc names need no resolver."""
    assert allows(EndpointAllowList(["ipc:///run/a"]), "ipc:///run/a", [])


@pytest.mark.parametrize(
    ("pattern", "reason_text"),
    [
        ("", "expected tcp://HOST:PORT"),
        ("10.0.0.0/8", "expected tcp://HOST:PORT, ipc:///PATH"),
        ("udp://10.0.0.1:1", "expected tcp://HOST:PORT, ipc:///PATH"),
        ("ipc://relative", "expected tcp://HOST:PORT, ipc:///PATH"),
        ("ipc:///run/../etc", "expected tcp://HOST:PORT, ipc:///PATH"),
        ("tcp://engine", "expected tcp://HOST:PORT, where"),
        ("tcp://engine:0", "expected tcp://HOST:PORT, where"),
        ("tcp://fc00::/7:*", "expected tcp://HOST:PORT, where"),
        ("tcp://engine:6000-5000", "the smaller port first"),
        ("tcp://engine:70000", "expected ports from 1 to 65535"),
        ("tcp://10.0.0.1/8:*", "has host bits set"),
        ("tcp://10.0.0:*", "Expected 4 octets"),
        ("tcp://0x7f.1:*", "Expected 4 octets"),
        ("tcp://[fe80::1%eth0]:*", "fe80::1%eth0"),
        ("tcp://[10.0.0.0/8]:*", "10.0.0.0"),
        ("tcp://[::ffff:10.0.0.0/104]:*", "IPv4-mapped IPv6 addresses count as IPv4"),
        ("tcp://*:5557", "write 0.0.0.0/0 and [::/0] for all addresses"),
        ("tcp://*foo:5557", "expected a name, *.SUFFIX"),
        ("tcp://eng*:5557", "expected a name, *.SUFFIX"),
        ("tcp://a@b:5557", "expected a name, *.SUFFIX"),
    ],
)
def test_invalid_patterns_are_rejected(pattern: str, reason_text: str) -> None:
    """The error names the pattern."""
    with pytest.raises(ConfigError, match=re.escape(reason_text)) as caught:
        EndpointAllowList(["tcp://engine:1", pattern])
    assert repr(pattern) in str(caught.value)


# --- against the standard library -------------------------------------------------------------------------------------------

fours = st.integers(0, 2**32 - 1).map(ipaddress.IPv4Address)
sixes = st.integers(0, 2**128 - 1).map(ipaddress.IPv6Address)


@st.composite
def networks_and_addresses(draw: st.DrawFn) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, Address]:
    """Draw a network, and an address that is in it in about half of the cases."""
    kind: st.SearchStrategy[Address] = draw(st.sampled_from([fours, sixes]))
    address = draw(kind)
    near = address if draw(st.booleans()) else draw(kind)
    return ipaddress.ip_network(f"{near}/{draw(st.integers(0, address.max_prefixlen))}", strict=False), address


def is_special(address: Address) -> bool:
    """Return whether the standard library or the list of metadata services says that an address needs its own pattern."""
    return (
        address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or address in ipaddress.ip_network("0.0.0.0/8")
        or address in ipaddress.ip_network("fd00:ec2::/32")
        or str(address) in {"255.255.255.255", "168.63.129.16", "100.100.100.200", "192.0.0.192"}
    )


@given(networks_and_addresses(), st.integers(1, 65535))
@example((ipaddress.ip_network("100.64.0.0/10"), ipaddress.ip_address("100.100.100.201")), 1)
def test_network_patterns_match_like_the_ipaddress_module(
    case: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, Address], port: int
) -> None:
    """An ordinary address is allowed if and only if the network contains it, as a literal or behind a name."""
    network, address = case
    if isinstance(address, ipaddress.IPv6Address) and (address.ipv4_mapped or address.sixtofour):
        return
    allow_list = EndpointAllowList([f"tcp://[{network}]:{port}" if network.version == 6 else f"tcp://{network}:{port}"])
    expected = address in network and (not is_special(address) or network.num_addresses == 1)
    assert allows(allow_list, endpoint_of(address, port)) == expected
    assert allows(allow_list, f"tcp://engine:{port}", [str(address)]) == expected
    assert allows(allow_list, f"tcp://engine:{port}", [address]) == expected
    assert not allows(allow_list, endpoint_of(address, port % 65535 + 1))


@given(fours)
@example(ipaddress.IPv4Address("10.0.0.1"))
@example(ipaddress.IPv4Address("169.254.169.254"))
def test_mapped_addresses_count_as_ipv4(address: ipaddress.IPv4Address) -> None:
    """This holds for literals and for resolved addresses, with any pattern."""
    mapped = ipaddress.IPv6Address(f"::ffff:{address}")
    for allow_list in (DEFAULT, OPEN, EndpointAllowList(["tcp://128.0.0.0/1:*"])):
        assert allows(allow_list, endpoint_of(mapped)) == allows(allow_list, endpoint_of(address))
        assert allows(allow_list, "tcp://engine:5557", [mapped]) == allows(allow_list, "tcp://engine:5557", [address])


@given(fours)
@example(ipaddress.IPv4Address("192.168.0.0"))
def test_the_default_covers_private_addresses_of_the_standard_library(address: ipaddress.IPv4Address) -> None:
    """It covers loopback, RFC 1918 and 100.64/10, except the metadata service in the latter."""
    near = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"]
    expected = address.is_loopback or any(address in ipaddress.ip_network(text) for text in near)
    assert allows(DEFAULT, endpoint_of(address)) == (expected and str(address) != "100.100.100.200")


# --- messages ---------------------------------------------------------------------------------------------------------------


def catch_refusal(endpoint: str, addresses: Iterable[str] | None = None) -> EndpointRefusedError:
    with pytest.raises(EndpointRefusedError) as caught:
        DEFAULT.check(endpoint, addresses)
    assert isinstance(caught.value, UsageError)
    assert caught.value.reason == "endpoint-refused"
    return caught.value


def test_a_refusal_has_a_reason_and_a_hint() -> None:
    """The error has the resolved address, and the hint has a pattern that would allow it."""
    error = catch_refusal("tcp://engine.example:5557", ["10.0.0.1", "8.8.8.8"])
    assert (
        str(error)
        == "endpoint 'tcp://engine.example:5557' is refused: it resolves to 8.8.8.8, which no pattern of the allow-list covers"
    )
    assert error.hint.startswith("add a pattern such as tcp://8.8.8.8:5557 to `allow`")
    error = catch_refusal("tcp://[2001:db8::1]:5557")
    assert "no pattern of the allow-list covers it" in str(error)
    assert "tcp://[2001:db8::1]:5557" in error.hint
    error = catch_refusal("tcp://169.254.169.254:80")
    assert "169.254.169.254 is a link-local address, where clouds have metadata services" in str(error)
    assert error.hint == "add a pattern for exactly this address to `allow`: tcp://169.254.169.254:80"
    assert catch_refusal("ipc:///run/a").hint == "add a pattern for this path to `allow`: ipc:///run/a"
    assert "has no address" in str(catch_refusal("tcp://engine:1", []))
    assert len(str(catch_refusal("tcp://" + "a" * 100_000))) < 300
