"""The defence against cross-site requests and DNS rebinding: which requests a browser may send.

A web page can make the browser of its visitor send requests to any address that the machine reaches, loopback included. The
browser sends the page's origin in `Origin` and `Sec-Fetch-Site`, which scripts cannot change, so the service refuses requests
of other origins. With DNS rebinding the host name of the page resolves to the service, and both headers say "same origin", but
`Host` then has the name of the page. So `Host` must be an address or a configured name as long as callers without a token have
any role. If every request needs a token, `Host` may be anything, because a browser does not add a bearer token by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvevents.service.access import Role
from kvevents.service.errors import ServiceError, UnauthorizedError
from kvevents.service.hosts import HostPatterns, address_of, host_of, is_loopback
from kvevents.service.http.messages import Headers

if TYPE_CHECKING:
    from kvevents.service.access import Access
    from kvevents.service.config import ServiceConfig

MAX_SHOWN: Final = 80
"""Characters of a header that an error quotes."""
_OWN_SITE: Final = frozenset({None, b"same-origin", b"none"})
"""Values of `Sec-Fetch-Site` in requests of the service's page, of the user, and of other programs than browsers."""


class OriginPolicy:
    """Refuses requests that a web page of another origin makes a browser send.

    The service listens at `host`, and clients reach it by `names`. `checks_host` says whether `Host` is checked.
    """

    def __init__(self, host: str, names: Sequence[str], *, checks_host: bool) -> None:
        self.names: Final = tuple(names)
        self._names: Final = HostPatterns(names, "allowed_hosts")
        self._host: Final = host.lower()
        self.checks_host: Final = checks_host
        self._is_loopback: Final = is_loopback(host)

    @classmethod
    def of(cls, config: ServiceConfig, access: Access) -> OriginPolicy:
        """Return the policy of a service with these settings."""
        names = list(config.allowed_hosts)
        if config.shard is not None:
            names.append(host_of(config.shard.url.partition("://")[2].rstrip("/")))
        return cls(config.host, names, checks_host=access.anonymous.role is not Role.NONE)

    def check(self, headers: Headers, *, is_read: bool) -> None:
        """Raise `UnauthorizedError` for a request of another origin, and `ServiceError` (421) for an unknown host name.

        `is_read` says that the request changes nothing, so a link on another site may open it in a browser.
        """
        if self.checks_host and headers.host is not None and not self._is_own_host(host_of(_text(headers.host))):
            hint = "use an address of this service, or add the name to allowed_hosts"
            raise ServiceError(f"unknown host {_quoted_text(headers.host)!r}", "unknown-host", hint, status=421)
        if headers.origin is not None and not self._is_own_origin(headers.origin, headers.host):
            hint = "a browser may send requests only from the service's own page; see allowed_hosts"
            raise UnauthorizedError(f"foreign origin {_quoted_text(headers.origin)!r}", "foreign-origin", hint, status=403)
        if headers.fetch_site not in _OWN_SITE and not (is_read and headers.fetch_mode == b"navigate"):
            hint = "a browser may send requests only from the service's own page"
            raise UnauthorizedError("a page of another origin sent this request", "foreign-origin", hint, status=403)

    def _is_own_origin(self, origin: bytes, host: bytes | None) -> bool:
        scheme, separator, place = _text(origin).lower().partition("://")
        if not separator or scheme not in {"http", "https"}:
            return False  # also `null`, the origin of sandboxed frames and files
        return (host is not None and place == _text(host).lower()) or host_of(place) in self._names

    def _is_own_host(self, host: str) -> bool:
        if host in (self._host, "localhost") or host.endswith(".localhost") or host in self._names:
            return True
        address = address_of(host)
        return address is not None and (address.is_loopback or not self._is_loopback)


def _text(value: bytes) -> str:
    return value.decode("latin-1").strip(" \t")


def _quoted_text(value: bytes) -> str:
    return _text(value)[:MAX_SHOWN]
