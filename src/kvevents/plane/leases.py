"""Leases: time-limited exclusive ownership of a name, stored in a key-value bucket of JetStream.

Theory of operation. A lease is an entry of the lease bucket that names its holder. All changes are compare-and-set: a process
creates, renews, takes over or deletes the entry only if it is the entry that the process has read. So two processes can never
acquire a lease from the same entry. The holder renews the lease every third of its length. It believes in the lease for no
longer than its length after the moment *before* it sent the last renewal, by a monotonic clock. Another process may take the
lease

- when the entry is gone: it was deleted, or has expired by the servers' clock, which counts from the arrival of the renewal;
- when it has seen the entry unchanged for the whole length by its own clock, regardless of the servers' clock;
- at once, if the holder was a process of the same machine that has ended.

So two processes never believe at once that they hold a lease, except if the servers' clock was set forward. Then the former
holder learns of it with its next renewal. What a lease protects must tolerate that. The log does: it accepts a page only from a
writer that has read all earlier pages.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kvevents.errors import PlaneError
from kvevents.plane.layout import LEASE_SECONDS, Layout
from kvevents.plane.nats_errors import map_errors
from kvevents.settings import Seconds, Settings, build_decoder_now

if TYPE_CHECKING:
    from nats.js import JetStreamContext
    from nats.js.kv import KeyValue

log = logging.getLogger(__name__)

RENEWALS: Final = 3
"""Renewals in the length of a lease: two may fail."""


class LeaseTimers(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timers of leases."""

    answer_seconds: Seconds = 4.0
    """Seconds for the servers to answer; a new leader is elected within that."""
    retry_seconds: Seconds = 0.5
    """Seconds between two attempts to renew or acquire a lease."""


DEFAULT_TIMERS: Final = LeaseTimers()


def boot_seconds() -> float:
    """Return the seconds of a monotonic clock that runs while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@build_decoder_now
class LeaseHolder(msgspec.Struct, frozen=True):
    """A process that holds or wants a lease."""

    host: str
    pid: int
    nonce: str
    """Random: a restarted process is another holder."""
    machine: str = ""
    """Boot and pid namespace in which `pid` and `started` identify a process; empty if unknown."""
    started: int = 0
    """Start of the process in ticks since boot; 0 if unknown."""

    @classmethod
    def current(cls) -> LeaseHolder:
        """Return this process as a holder, with a new nonce."""
        pid = os.getpid()
        return cls(socket.gethostname(), pid, secrets.token_hex(8), _machine(), _process_start(pid) or 0)

    def __str__(self) -> str:
        return f"process {self.pid} at {self.host}"

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended; only a process of this machine can be."""
        if not self.machine or self.machine != _machine():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass  # it runs as another user
        started = _process_start(self.pid)
        return started is not None and self.started not in {0, started}


def _machine() -> str:
    """Return the boot id of this machine and its pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _process_start(pid: int) -> int | None:
    """Return when a process started, in ticks since boot (`proc(5)`, field 22 of stat); 0 for a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return 0 if fields[0] in {"Z", "X"} else int(fields[19])


_UNKNOWN_HOLDER: Final = LeaseHolder("an unknown place", 0, "")
"""Holder of an entry that another release wrote."""


class _Entry(NamedTuple):
    revision: int
    holder: LeaseHolder


class Lease:
    """One lease, as seen by a process that holds or wants it. Use it in one event loop.

    Each `Lease` of a key needs a `holder` of its own. `seconds` is at most `LEASE_SECONDS`, after which the servers expire
    entries, and is the same for all processes.
    """

    def __init__(
        self,
        js: JetStreamContext,
        layout: Layout,
        key: str,
        holder: LeaseHolder,
        *,
        seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = boot_seconds,
        timers: LeaseTimers = DEFAULT_TIMERS,
    ) -> None:
        self.key: Final = key
        self.seconds: Final = seconds
        self.rival: LeaseHolder | None = None
        """Holder of the lease at the last attempt to acquire it."""
        self._own: Final = holder
        self._js: Final = js
        self._bucket: Final = layout.leases
        self._clock: Final = clock
        self._timers: Final = timers
        self._kv: KeyValue | None = None
        self._revision: int | None = None
        self._until = 0.0
        self._lost = ""
        self._seen: tuple[int, float] = (0, 0.0)
        """Revision of the other holder's entry that was read last, and when it was read first."""

    def __repr__(self) -> str:
        state = "held" if self.is_held else self.lost or "not held"
        return f"<Lease {self.key} {state}>"

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lease now, without a request."""
        return self._revision is not None and self._clock() < self._until

    @property
    def lost(self) -> str:
        """Why the lease was lost; empty while it is held, before it was acquired, and after it was released."""
        if self._revision is not None and not self.is_held:
            return f"it could not be renewed for {self.seconds:g} s"
        return self._lost

    # --- operations

    async def acquire(self, within: float = 0.0) -> bool:
        """Try to acquire the lease for `within` seconds; return False if another process holds it.

        Raises `PlaneError` if the servers did not answer the last attempt.
        """
        end = self._clock() + within
        while True:
            try:
                if await self._try():
                    return True
            except PlaneError:
                if self._clock() >= end:
                    raise
            left = end - self._clock()
            if left <= 0 and self.rival is not None:
                return False
            # Without a rival the entry changed after it was read, perhaps by a delayed renewal of this process.
            await asyncio.sleep(min(left, self._timers.retry_seconds) if left > 0 else self._timers.retry_seconds)

    async def renew(self) -> bool:
        """Extend the lease to `seconds` from now; return False if it is lost, with the reason in `lost`.

        Raises `PlaneError` if the servers do not answer; the lease then remains held while `is_held`.
        """
        if not self.is_held or self._revision is None:
            return False
        if await self._put(self._revision):
            return True
        found = await self._read()
        if found is not None and found.holder.nonce == self._own.nonce:
            # An earlier renewal arrived although its acknowledgement did not.
            self._revision = found.revision
            return await self._put(found.revision) or self._lose("another process changes its entry")
        self.rival = found and found.holder
        return self._lose(f"{found.holder} has taken it" if found else "its entry is gone")

    async def renew_until_lost(self) -> str:
        """Renew the lease until it is lost; return the reason."""
        logged, pause = "", self.seconds / RENEWALS
        while self.is_held:
            await asyncio.sleep(min(pause, max(0.0, self._until - self._clock())))
            try:
                async with asyncio.timeout(max(0.0, self._until - self._clock())):
                    await self.renew()
            except PlaneError as error:
                if str(error) != logged:
                    log.warning("lease %s: %s", self.key, error)
                logged, pause = str(error), min(self._timers.retry_seconds, self.seconds / RENEWALS)
            except TimeoutError:
                continue
            else:
                logged, pause = "", self.seconds / RENEWALS
        return self.lost

    async def release(self) -> None:
        """Delete the entry so that others need not wait; if the servers do not answer, it expires."""
        revision, self._revision = self._revision, None
        if revision is None:
            return
        with suppress(PlaneError, TimeoutError):
            async with asyncio.timeout(self._timers.answer_seconds):
                with map_errors(f"releasing lease {self.key}"):
                    await (await self._bucket_of()).delete(self.key, last=revision)

    async def holder(self) -> LeaseHolder | None:
        """Return the holder in the bucket; None without an entry. Raises `PlaneError`."""
        found = await self._read()
        return found and found.holder

    # --- one attempt

    async def _try(self) -> bool:
        if self.is_held:
            return True
        self.rival = None
        found = await self._read()
        if found is None:
            return await self._put(None)
        if self._can_take(found):
            return await self._put(found.revision)
        self.rival = found.holder
        return False

    def _can_take(self, found: _Entry) -> bool:
        if found.holder.nonce == self._own.nonce or found.holder.has_ended():
            return True
        if self._seen[0] != found.revision:
            self._seen = (found.revision, self._clock())
        return self._clock() - self._seen[1] >= self.seconds

    async def _put(self, last: int | None) -> bool:
        """Write the entry if its revision is `last`; return False if it is not."""
        sent = self._clock()
        value = msgspec.json.encode(self._own)
        try:
            async with asyncio.timeout(self._timers.answer_seconds):
                with map_errors(f"writing lease {self.key}"):
                    bucket = await self._bucket_of()
                    made = bucket.create(self.key, value) if last is None else bucket.update(self.key, value, last)
                    self._revision = await made
        except PlaneError as error:
            if error.fault in {"conflict", "missing"}:  # `missing` if it expired within `create`
                return False
            raise
        except TimeoutError as error:
            raise self._timeout_error("writing") from error
        self._until, self._lost = sent + self.seconds, ""
        return True

    async def _read(self) -> _Entry | None:
        try:
            async with asyncio.timeout(self._timers.answer_seconds):
                with map_errors(f"reading lease {self.key}"):
                    found = await (await self._bucket_of()).get(self.key)
        except PlaneError as error:
            if error.fault == "missing" and self._kv is not None:
                return None
            raise
        except TimeoutError as error:
            raise self._timeout_error("reading") from error
        try:
            holder = msgspec.json.decode(found.value or b"", type=LeaseHolder)
        except msgspec.MsgspecError:
            holder = _UNKNOWN_HOLDER
        return _Entry(found.revision or 0, holder)

    async def _bucket_of(self) -> KeyValue:
        if self._kv is None:
            self._kv = await self._js.key_value(self._bucket)
        return self._kv

    def _lose(self, why: str) -> bool:
        self._revision, self._lost = None, why
        return False

    def _timeout_error(self, activity: str) -> PlaneError:
        return PlaneError(
            f"{activity} lease {self.key}: no answer in {self._timers.answer_seconds:g} s; check the load of the servers "
            "and that a majority of them runs",
            fault="timeout",
        )
