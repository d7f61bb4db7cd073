"""Endpoints: their syntax, the endpoints of each rank, and port collisions between ranks."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import Final
from urllib.parse import SplitResult, urlsplit

from kvevents.errors import ConfigError

MAX_PORT: Final = 65535
_TRANSPORTS: Final = ("tcp", "ipc", "inproc")
HTTP_SCHEMES: Final = ("http", "https")
GRPC: Final = "grpc://"
"""Prefix of the endpoint of an SMG (Shepherd Model Gateway) worker, which sends its events as a gRPC stream."""
_ANY_IPV4: Final = "0.0.0.0"  # noqa: S104 - a host to recognise, not to bind
_LOOPBACK_HOSTS: Final = {"*": "127.0.0.1", _ANY_IPV4: "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}
"""The address at which each wildcard host is reachable from this host."""


def split_tcp(endpoint: str) -> tuple[str, int] | None:
    """Return host and port of a `tcp://` endpoint; None if the transport is not TCP or the port is not valid.

    The port `*`, which means "any" to ZeroMQ, becomes 0. A host with colons must be an IPv6 address.
    """
    transport, separator, address = endpoint.partition("://")
    host, colon, port = address.rpartition(":")
    if transport != "tcp" or not separator or not colon or not host or (":" in host and not _is_ipv6(host)):
        return None
    if port == "*":
        return host, 0
    return (host, int(port)) if port.isascii() and port.isdecimal() else None


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host[1:-1] if host[0] + host[-1] == "[]" else host)
    except ValueError:
        return False
    return True


def tcp_of(endpoint: str) -> str:
    """Return the TCP endpoint that a `grpc://` endpoint connects to; return any other endpoint unchanged."""
    return f"tcp://{endpoint.removeprefix(GRPC)}" if endpoint.startswith(GRPC) else endpoint


def split_url(url: str, schemes: Collection[str]) -> SplitResult | None:
    """Return the parts of a URL with one of these schemes; None if the URL has no host, an invalid port, or a login."""
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in schemes and parts.hostname and parts.port != 0 and parts.username is None
    except ValueError:  # the port is invalid, or a bracket is not closed
        return None
    return parts if is_server else None


def complete_replay(endpoint: str, replay: str) -> str:
    """Return a replay endpoint. If `replay` is only a port, the host is that of `endpoint`."""
    return f"{endpoint.rpartition(':')[0]}:{replay}" if replay.isdecimal() else replay


def validate_endpoint(endpoint: str, name: str = "endpoint") -> None:
    """Raise `ConfigError`, with the name of the setting, for an endpoint that no ZeroMQ socket can connect or bind to."""
    transport, separator, address = endpoint.partition("://")
    if transport in {"http", "https"}:
        raise ConfigError(f"invalid {name} {endpoint!r}: expected tcp://HOST:PORT with the engine's port of KV events")
    if not separator or not address or transport not in _TRANSPORTS:
        problem = "has no transport" if not separator else "has another transport, or no address"
        raise ConfigError(f"invalid {name} {endpoint!r}: it {problem}; expected tcp://HOST:PORT, ipc://PATH or inproc://NAME")
    # ZeroMQ also accepts a source address: tcp://FROM;HOST:PORT.
    target = split_tcp(f"{transport}://{address.rpartition(';')[2]}")
    if transport == "tcp" and (target is None or target[1] > MAX_PORT):
        raise ConfigError(f"invalid {name} {endpoint!r}: expected tcp://HOST:PORT with a port up to {MAX_PORT}")


def validate_source(endpoint: str, name: str = "endpoint") -> None:
    """Raise `ConfigError` if `endpoint` is neither `grpc://HOST:PORT` nor accepted by `validate_endpoint`."""
    if not endpoint.startswith(GRPC):
        validate_endpoint(endpoint, name)
        return
    target = split_tcp(tcp_of(endpoint))
    if target is None or not 0 < target[1] <= MAX_PORT:
        raise ConfigError(f"invalid {name} {endpoint!r}: expected {GRPC}HOST:PORT with a port up to {MAX_PORT}")


def validate_remote(endpoint: str, name: str = "endpoint") -> None:
    """Raise `ConfigError` for an endpoint with the host `*`, to which nothing can connect."""
    if (split_tcp(endpoint) or ("",))[0] == "*":
        raise ConfigError(
            f"invalid {name} {endpoint!r}: nothing can connect to the host `*`; write the engine's host, such as "
            f"{connectable_endpoint(endpoint)}, or set bind (`kvevents tail --bind`) if the engine connects"
        )


def validate_port(endpoint: str) -> None:
    """Raise `ConfigError` for a port that libzmq would misread: libzmq uses the low 16 bits of the leading number."""
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp://") and port != "*" and not (port.isascii() and port.isdecimal() and int(port) <= MAX_PORT):
        raise ConfigError(f"invalid endpoint {endpoint!r}: port {port!r} is not a number up to {MAX_PORT}")


def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None:
    """Return the endpoint of a rank: its port plus the rank; `inproc://` and `ipc://` names get the suffix `_dp<rank>`.

    Return `endpoint` unchanged if it is None, if the rank is 0, or if the OS chooses the port (0 or `*`). The rule is that
    of vLLM 0.33 (`vllm/distributed/kv_events.py`), except for `ipc://`, which the engines reject.

    Raises `ConfigError`, a ValueError, for another transport or a port above 65535.
    """
    if not endpoint or data_parallel_rank == 0 or endpoint == "ipc://*":
        return endpoint
    if "inproc" in endpoint or endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{data_parallel_rank}"
    if "tcp" not in endpoint:
        raise ConfigError(f"Invalid endpoint: must contain 'inproc' or 'tcp', or start with 'ipc://'; it is {endpoint!r}")
    transport, separator, address = endpoint.partition("://")
    source, semicolon, address = address.rpartition(";")  # ZeroMQ also accepts a source address: tcp://FROM;HOST:PORT
    target = split_tcp(transport + separator + address)
    if target is None:
        raise ConfigError(f"invalid endpoint {endpoint!r}: expected tcp://HOST:PORT with a port up to {MAX_PORT}")
    host, port = target
    if port == 0:
        return endpoint
    if port + data_parallel_rank > MAX_PORT:
        needed = port + data_parallel_rank
        raise ConfigError(
            f"port {needed}, which rank {data_parallel_rank} of {endpoint} needs, does not exist; choose a lower one"
        )
    return f"tcp://{source}{semicolon}{host}:{port + data_parallel_rank}"


def should_bind(endpoint: str) -> bool:
    """Whether the engines bind to this endpoint rather than connect (SGLang 0.5.23, vLLM 0.33).

    Engines bind to wildcards, `ipc://` and `inproc://`. Engines also bind to port 0, to which nothing can connect.
    """
    target = split_tcp(endpoint)
    if endpoint.startswith(("ipc://", "inproc://")) or (target is not None and target[1] == 0):
        return True
    return "*" in endpoint or "::" in endpoint or _ANY_IPV4 in endpoint


def needs_ipv6(endpoint: str) -> bool:
    """Whether a socket needs IPv6 to use this endpoint."""
    return endpoint.startswith("tcp://") and ("[" in endpoint or "::" in endpoint)


def connectable_endpoint(endpoint: str) -> str:
    """Return the endpoint at which a consumer on this host reaches a bound endpoint; wildcards become loopback addresses."""
    target = split_tcp(endpoint)
    if target is None:
        return endpoint
    host, port = target
    return f"tcp://{_LOOPBACK_HOSTS.get(host, host)}:{port}"


def port_collision(endpoint: str, replay_endpoint: str | None, data_parallel_rank: int) -> str | None:
    """Return a message if a port of this rank is also a port of a lower rank, or if this rank's two ports are equal.

    Return None if no ports are equal. All ranks run on one host and bind both endpoints. The arguments are those of rank 0.
    """
    events, replay = split_tcp(endpoint), split_tcp(replay_endpoint or "")
    if events is None or replay is None or 0 in {events[1], replay[1]}:
        return None
    hosts = {events[0], replay[0]}
    if len(hosts) > 1 and not hosts & _LOOPBACK_HOSTS.keys():
        return None
    distance = replay[1] - events[1]
    if abs(distance) > data_parallel_rank:
        return None
    lower_rank = data_parallel_rank - abs(distance)
    port_name, lower_port_name = ("event", "replay") if distance >= 0 else ("replay", "event")
    port = max(events[1], replay[1]) + lower_rank
    return (
        f"the {port_name} port {port} of rank {data_parallel_rank} is the {lower_port_name} port of rank {lower_rank}; "
        f"put the replay endpoint at least as many ports from port {events[1]} as there are ranks"
    )


def with_bound_port(endpoint: str | None, bound_endpoint: str | None) -> str | None:
    """Return `endpoint`, with the port of `bound_endpoint` if `endpoint` is a TCP endpoint with port 0."""
    target, bound_target = split_tcp(endpoint or ""), split_tcp(bound_endpoint or "")
    if target is None or bound_target is None or target[1] != 0:
        return endpoint
    return f"tcp://{target[0]}:{bound_target[1]}"
