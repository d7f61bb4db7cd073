"""Topics of the streams that pass through a subscriber, whose deliveries do not carry them but whose recording must."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

from kvevents.stream import Ask, Source, Stream
from kvevents.subscriber import Link, Transport
from kvevents.wire import Live, ReplayBatch, parse_live, parse_replay_reply


class TopicTap:
    """A transport that looks at what another one brings. An engine has one topic in its life: the first that was seen in it."""

    def __init__(self, transport: Transport, unknown: bytes) -> None:
        self._transport = transport
        self._unknown = unknown
        self._topics: dict[tuple[str, int, int], bytes] = {}
        self._newest: dict[tuple[str, int], bytes] = {}
        self._links: dict[Link, _TappedLink] = {}

    def of(self, source: str, rank: int, incarnation: int) -> bytes:
        """The topic of a life; as long as no message named it, which older engines' replies do not, the newest one seen."""
        known = self._topics.get((source, rank, incarnation))
        return self._newest.get((source, rank), self._unknown) if known is None else known

    def note(self, stream: Stream, topic: bytes) -> None:
        """A message that was just fed to `stream` came with this topic."""
        key = (stream.source.label, stream.source.rank)
        self._newest[key] = topic
        self._topics.setdefault((*key, stream.incarnation), topic)

    def open(self, source: Source) -> Link:
        """Open a link and look at it."""
        link = self._transport.open(source)
        tapped = self._links[link] = _TappedLink(link, self)
        return tapped

    def wait(self, timeout: float | None) -> Collection[Link]:
        """As the transport's own."""
        return [self._links[link] for link in self._transport.wait(timeout)]

    def fileno(self) -> int:
        """As the transport's own."""
        return self._transport.fileno()

    def close(self) -> None:
        """As the transport's own."""
        self._transport.close()


class _TappedLink:
    """A link whose stream is looked at on the way."""

    def __init__(self, link: Link, tap: TopicTap) -> None:
        self._link = link
        self._tap = tap

    def pump(self, stream: Stream, now: float, limit: int) -> bool:
        return self._link.pump(cast("Stream", _TappedStream(stream, self._tap)), now, limit)

    def send(self, ask: Ask) -> None:
        self._link.send(ask)

    def end_replay(self) -> None:
        self._link.end_replay()

    def close(self) -> None:
        self._link.close()


class _TappedStream:
    """What a link uses of a stream."""

    def __init__(self, stream: Stream, tap: TopicTap) -> None:
        self._stream = stream
        self._tap = tap
        self.connected = stream.connected
        self.disconnected = stream.disconnected

    def receive_live(self, frames: Sequence[bytes], now: float) -> None:
        self._stream.receive_live(frames, now)
        live = parse_live(frames)
        if isinstance(live, Live):
            self._tap.note(self._stream, live.topic)

    def receive_replay(self, frames: Sequence[bytes], now: float) -> None:
        self._stream.receive_replay(frames, now)
        reply = parse_replay_reply(frames)
        if isinstance(reply, ReplayBatch) and reply.topic is not None:
            self._tap.note(self._stream, reply.topic)
