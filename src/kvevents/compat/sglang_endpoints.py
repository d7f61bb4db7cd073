"""SGLang's rules for endpoints: which can be advertised, which can be bound, and where load reports go.

The rules are those of `sglang/srt/disaggregation/kv_events.py`, 0.5.23. Every function takes the configured endpoint and
returns None if it is invalid, since `/server_info` calls them for each request and must not fail.
"""

from __future__ import annotations

from ipaddress import IPv6Address
from typing import Final, TypeAlias

from kvevents.endpoints import MAX_PORT

_BINDABLE_HOSTS: Final = frozenset({"*", "0.0.0.0", "::"})  # noqa: S104 - to recognise them in settings

Address: TypeAlias = tuple[str, int]
"""Host, without brackets, and port."""


def _split(endpoint: str | None) -> Address | None:
    """Return host and port of a `tcp://` endpoint. An IPv6 host needs brackets, since its port is ambiguous without them."""
    if not endpoint or not endpoint.startswith("tcp://"):
        return None
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not colon or not host or not _is_port(port):
        return None
    if host.startswith("["):
        inner = host.removeprefix("[").removesuffix("]")
        return (inner, int(port)) if host.endswith("]") and _is_ipv6(inner) else None
    return None if _is_ipv6(host) else (host, int(port))


def _is_port(text: str) -> bool:
    try:
        return 0 < int(text) <= MAX_PORT
    except ValueError:
        return False


def _is_ipv6(host: str) -> bool:
    try:
        IPv6Address(host)
    except ValueError:
        return False
    return True


def parse_tcp_port(endpoint: str | None) -> int | None:
    """Return the port, 1 to 65535, of a `tcp://` endpoint with any host."""
    found = _split(endpoint)
    return None if found is None else found[1]


def parse_advertisable_tcp(endpoint: str | None) -> Address | None:
    """Return host and port as `/server_info` reports them, an IPv6 host in brackets."""
    found = _split(endpoint)
    if found is None:
        return None
    host, port = found
    return (f"[{host}]" if _is_ipv6(host) else host), port


def parse_bindable_tcp(endpoint: str | None) -> Address | None:
    """Return host and port if the host is a wildcard; SGLang connects to all other hosts."""
    found = _split(endpoint)
    return found if found is not None and found[0] in _BINDABLE_HOSTS else None


def resolve_load_pub_range(
    *,
    kv_endpoint: str | None,
    replay_endpoint: str | None,
    dp_size: int,
    load_publish_endpoint: str | None = None,
) -> tuple[Address | None, str | None]:
    """Return the address at which rank 0 publishes its load, and the reason if there is none.

    Rank r publishes r ports higher. `load_publish_endpoint` is `off` or empty (no address and no reason), `auto` (the ports
    after those of the events, or after those of replay if they would overlap), or an address.
    """
    mode = (load_publish_endpoint or "").strip()
    if dp_size < 1 or not mode or mode.lower() == "off":
        return None, None
    pick = _after_events if mode.lower() == "auto" else _as_configured
    found, reason = pick(kv_endpoint, replay_endpoint, dp_size, mode)
    if found is not None and found[1] + dp_size - 1 > MAX_PORT:
        return None, f"the load port range from {found[1]} would run past the u16 ceiling, {MAX_PORT}"
    return found, reason


def _overlap(one: int | None, other: int, size: int) -> bool:
    return one is not None and abs(one - other) < size


def _after_events(
    kv_endpoint: str | None, replay_endpoint: str | None, dp_size: int, _mode: str
) -> tuple[Address | None, str | None]:
    events = parse_bindable_tcp(kv_endpoint)
    if events is None:
        why = "it is not set" if kv_endpoint is None else f"it is {kv_endpoint!r}"
        return None, f"--load-publish-endpoint=auto needs a wildcard tcp:// endpoint in --kv-events-config; {why}"
    host, base = events[0], events[1] + dp_size
    replay = parse_tcp_port(replay_endpoint)
    if replay is not None and _overlap(replay, base, dp_size):
        base = replay + dp_size
    return (host, base), None


def _as_configured(
    kv_endpoint: str | None, replay_endpoint: str | None, dp_size: int, mode: str
) -> tuple[Address | None, str | None]:
    if parse_tcp_port(kv_endpoint) is None:
        absent = "without --kv-events-config" if kv_endpoint is None else f"for endpoint {kv_endpoint!r}"
        return None, (
            f"--load-publish-endpoint={mode!r} needs a routable tcp:// endpoint in --kv-events-config: routers find it through "
            f"the kv_events block of /server_info, which is absent {absent}"
        )
    found = parse_bindable_tcp(mode)
    if found is None:
        return None, f"--load-publish-endpoint={mode!r} is not a bindable tcp:// address; its host must be a wildcard"
    for port in (parse_tcp_port(kv_endpoint), parse_tcp_port(replay_endpoint)):
        if _overlap(port, found[1], dp_size):
            return None, f"--load-publish-endpoint={mode!r} overlaps the {dp_size} kv-events ports from {port}"
    return found, None
