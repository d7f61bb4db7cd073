"""Which replicas may be asked: prompts and the token of this replica are sent to those alone.

Theory of operation. Replicas announce their URLs in a bucket of the plane, and whoever may write there may announce any URL.
So the host of an announced URL must fit the patterns of `shard.allow`, and if this replica is reached by `https`, so must
the others: then TLS proves that the host is the one that it is called.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from kvevents.service.config import ShardSettings
from kvevents.service.hosts import HostPatterns, address_of, is_loopback

_LOOPBACK: Final = ("127.0.0.0/8", "::1", "localhost")


class PeerPolicy:
    """The rule for the URLs of other replicas."""

    def __init__(self, settings: ShardSettings) -> None:
        own = urlsplit(settings.url)
        self.patterns: Final = tuple(settings.allow) or _beside(own.hostname or "")
        self._hosts: Final = HostPatterns(self.patterns, "shard.allow")
        self._is_secure: Final = own.scheme == "https"

    def refusal(self, url: str) -> str:
        """Why a URL must not be asked; empty if it may be."""
        parts = urlsplit(url)
        if self._is_secure and parts.scheme != "https":
            return f"{url} is not encrypted, and this replica is reached by https"
        if (parts.hostname or "") not in self._hosts:
            return f"{url} is not among shard.allow ({', '.join(self.patterns)})"
        return ""


def _beside(host: str) -> tuple[str, ...]:
    """Patterns for the other replicas when none are configured."""
    if is_loopback(host):
        return _LOOPBACK
    domain = host.partition(".")[2]
    if address_of(host) is None and "." in domain:
        return (f"*.{domain}",)
    return (host,)
