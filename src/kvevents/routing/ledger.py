"""What was sent where and has not been answered."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from kvevents.routing.choice import IDLE, Load, Worker

MAX_IN_FLIGHT: Final = 65_536
"""Requests in flight that a router remembers, about 250 bytes each; beyond, the oldest count as finished. Of 64 workers with
256 requests at once it is four times as many."""


class _Account:
    """A worker's load. A removed worker's requests keep theirs to the end, and a new one of its name gets another."""

    __slots__ = ("load",)

    def __init__(self) -> None:
        self.load = IDLE


class _Sent:
    __slots__ = ("account", "answering", "length", "waiting")

    def __init__(self, account: _Account, length: int, waiting: int) -> None:
        self.account, self.length, self.waiting = account, length, waiting
        self.answering = False


class Ledger:
    """Loads of workers, from what was sent to them and what came back. Of one thread at a time."""

    def __init__(self, max_in_flight: int = MAX_IN_FLIGHT) -> None:
        self._max_in_flight = max_in_flight
        self._accounts: dict[Worker, _Account] = {}
        self._sent: dict[Hashable, _Sent] = {}
        self.forgotten = 0
        """Requests that were given up because too many were in flight."""

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """In the order in which they were opened."""
        return tuple(self._accounts)

    def open(self, worker: Worker) -> None:
        """A worker may be sent to. Once is enough."""
        self._accounts.setdefault(worker, _Account())

    def close(self, worker: Worker) -> None:
        """A worker is gone, and its requests with it."""
        self._accounts.pop(worker, None)

    def loads(self) -> list[tuple[Worker, Load]]:
        """Of every worker that is open."""
        return [(worker, account.load) for worker, account in self._accounts.items()]

    def load(self, worker: Worker) -> Load | None:
        """Of one worker; None where it is not open."""
        account = self._accounts.get(worker)
        return account.load if account else None

    def sent(self, key: Hashable, worker: Worker, length: int, waiting: int) -> None:
        """A prompt of `length` tokens, of which `waiting` are expected to be computed. A key that is there is replaced."""
        self.finished(key)
        account = self._accounts[worker]
        load = account.load
        account.load = Load(load.requests + 1, load.waiting_tokens + waiting, load.decoding, load.decoding_tokens)
        self._sent[key] = _Sent(account, length, waiting)
        if len(self._sent) > self._max_in_flight:
            self.forgotten += 1
            self.finished(next(iter(self._sent)))

    def first_token(self, key: Hashable) -> None:
        """The prompt is computed. Whatever is not in flight, or was so before, changes nothing."""
        sent = self._sent.get(key)
        if sent is None or sent.answering:
            return
        sent.answering = True
        load = sent.account.load
        sent.account.load = Load(
            load.requests, load.waiting_tokens - sent.waiting, load.decoding + 1, load.decoding_tokens + sent.length
        )

    def finished(self, key: Hashable) -> None:
        """Answered, failed or cancelled. Whatever is not in flight changes nothing."""
        self.first_token(key)
        sent = self._sent.pop(key, None)
        if sent is None:
            return
        load = sent.account.load
        sent.account.load = Load(load.requests - 1, load.waiting_tokens, load.decoding - 1, load.decoding_tokens - sent.length)
