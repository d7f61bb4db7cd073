"""Leases: who does, for now, what one process at a time may do, such as to hold a share under the name of a replica.

Theory of operation. A lease is an entry of the bucket of leases that says who holds it. All changes go by compare-and-set:
made where there is none, renewed, taken over and given back where the entry is the one that was seen. So two can never have got
it by the same entry. The holder renews it every third of its length, and believes in it no longer than that length after the
moment *before* the last renewal was sent, by its own clock, which nobody sets. Others may take it

- when the entry is gone: given back, or expired by the servers' clock, which counts from when the renewal came;
- when they have seen it unchanged for its whole length by their own clock, whatever the servers' clock does;
- at once, when its holder was a process of this machine that has ended.

So there are never two who believe that they hold it, but for one case: the servers' clock was set forward. Then the former
holder learns of it by its next renewal. What a lease guards must bear that, as the log does: it takes a page only from who has
read all before it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kvevents.errors import PlaneError
from kvevents.plane.faults import told
from kvevents.plane.layout import LEASE_SECONDS, Layout
from kvevents.structs import build_decoder_now

if TYPE_CHECKING:
    from nats.js import JetStreamContext
    from nats.js.kv import KeyValue

log = logging.getLogger(__name__)

RENEWALS: Final = 3
"""In the length of a lease: two may fail."""
ANSWER_SECONDS: Final = 4.0
"""For the servers to answer; a new leader is elected within that."""
AGAIN_SECONDS: Final = 0.5
"""Between two attempts to renew a lease, or to get it."""
_PLAIN: Final = re.compile(rb"[A-Za-z0-9_-]")
_SPELLED: Final = re.compile(rb"=([0-9A-F]{2})")


def lease_key(kind: str, name: str) -> str:
    """The key of a lease, another one for each `name` of whatever characters: `replica.node-7`, `replica.node-7=2Eexample`."""
    return f"{kind}.{b''.join(_spell(byte) for byte in name.encode('utf-8', 'surrogatepass')).decode()}"


def lease_name(key: str) -> str:
    """The name that `lease_key` was told."""
    spelled = key.partition(".")[2].encode("utf-8", "replace")
    return _SPELLED.sub(lambda found: bytes((int(found[1], 16),)), spelled).decode("utf-8", "replace")


def _spell(byte: int) -> bytes:
    """One byte in characters that keys may have, and dots, which would be levels, not among them."""
    found = bytes((byte,))
    return found if _PLAIN.fullmatch(found) else b"=%02X" % byte


def elapsed() -> float:
    """Seconds of a clock that nobody sets, and that goes on while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@build_decoder_now
class Holder(msgspec.Struct, frozen=True):
    """Who holds a lease, or wants to: one life of one process."""

    host: str
    pid: int
    life: str
    """Random: who comes after a restart is somebody else."""
    machine: str = ""
    """Within which `pid` and `born` are a process; empty where that is not known."""
    born: int = 0

    @classmethod
    def here(cls) -> Holder:
        """The process that asks, with a new life."""
        pid = os.getpid()
        return cls(socket.gethostname(), pid, secrets.token_hex(8), _machine(), _born(pid) or 0)

    def __str__(self) -> str:
        return f"process {self.pid} at {self.host}"

    def has_ended(self) -> bool:
        """Whether it is known to be no more; only a process of this machine can be."""
        if not self.machine or self.machine != _machine():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass  # somebody else's, and alive
        born = _born(self.pid)
        return born is not None and self.born not in {0, born}


def _machine() -> str:
    """The boot of this machine, and the namespace that process ids are of."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _born(pid: int) -> int | None:
    """When a process began, in ticks since boot (`proc(5)`, field 22 of stat); 0 of one that has ended and not been buried."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return 0 if fields[0] in {"Z", "X"} else int(fields[19])


_NOBODY_KNOWN: Final = Holder("an unknown place", 0, "")
"""Of an entry that was not written by this release."""


class _Entry(NamedTuple):
    revision: int
    holder: Holder


class Lease:
    """One lease, as one who has it or wants it. To be used in one event loop.

    `holder` must be of its own for each `Lease` of one key. `seconds` is at most `LEASE_SECONDS`, after which the servers let
    entries expire, and the same for all who want it.
    """

    def __init__(
        self,
        js: JetStreamContext,
        layout: Layout,
        key: str,
        holder: Holder,
        *,
        seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = elapsed,
    ) -> None:
        self.key: Final = key
        self.seconds: Final = seconds
        self.rival: Holder | None = None
        """Who had it when this one wanted it last."""
        self._own: Final = holder
        self._js: Final = js
        self._bucket: Final = layout.leases
        self._clock: Final = clock
        self._found: KeyValue | None = None
        self._revision: int | None = None
        self._until = 0.0
        self._lost = ""
        self._seen: tuple[int, float] = (0, 0.0)
        """The entry of somebody else that was seen last, and since when."""

    def __repr__(self) -> str:
        state = "held" if self.is_held else self.lost or "not held"
        return f"<Lease {self.key} {state}>"

    @property
    def is_held(self) -> bool:
        """Whether this one has it at this moment; asks nobody."""
        return self._revision is not None and self._clock() < self._until

    @property
    def lost(self) -> str:
        """Why it is held no longer; empty while it is, before it was, and after it was given back."""
        if self._revision is not None and not self.is_held:
            return f"it could not be renewed for {self.seconds:g} s"
        return self._lost

    # --- what is done with it

    async def acquire(self, within: float = 0.0) -> bool:
        """Get it, trying for so many seconds; False where somebody else has it.

        Raises `PlaneError` where the servers could not be asked at the end.
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
            # Without a rival the entry changed after it was read, perhaps by a renewal of this process that was sent late.
            await asyncio.sleep(min(left, AGAIN_SECONDS) if left > 0 else AGAIN_SECONDS)

    async def renew(self) -> bool:
        """Hold it for `seconds` from now on; False when it is lost, which `lost` explains.

        Raises `PlaneError` where the servers do not answer: it is held until `is_held` says that it is not.
        """
        if not self.is_held or self._revision is None:
            return False
        if await self._put(self._revision):
            return True
        found = await self._read()
        if found is not None and found.holder.life == self._own.life:
            # An earlier renewal came after all, though nobody said so.
            self._revision = found.revision
            return await self._put(found.revision) or self._lose("somebody else changes it")
        self.rival = found and found.holder
        return self._lose(f"{found.holder} has taken it" if found else "its entry is gone")

    async def keep(self) -> str:
        """Renew it as often as need be until it is lost; why it was."""
        said, pause = "", self.seconds / RENEWALS
        while self.is_held:
            await asyncio.sleep(min(pause, max(0.0, self._until - self._clock())))
            try:
                async with asyncio.timeout(max(0.0, self._until - self._clock())):
                    await self.renew()
            except PlaneError as error:
                if str(error) != said:
                    log.warning("lease %s: %s", self.key, error)
                said, pause = str(error), min(AGAIN_SECONDS, self.seconds / RENEWALS)
            except TimeoutError:
                continue
            else:
                said, pause = "", self.seconds / RENEWALS
        return self.lost

    async def release(self) -> None:
        """Give it back, so that others need not wait; where the servers do not answer it expires."""
        revision, self._revision = self._revision, None
        if revision is None:
            return
        with suppress(PlaneError, TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS):
                with told(f"giving back lease {self.key}"):
                    await (await self._store()).delete(self.key, last=revision)

    async def holder(self) -> Holder | None:
        """Who has it, as far as the servers know; None for nobody. Raises `PlaneError`."""
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
        if self._may_take(found):
            return await self._put(found.revision)
        self.rival = found.holder
        return False

    def _may_take(self, found: _Entry) -> bool:
        if found.holder.life == self._own.life or found.holder.has_ended():
            return True
        if self._seen[0] != found.revision:
            self._seen = (found.revision, self._clock())
        return self._clock() - self._seen[1] >= self.seconds

    async def _put(self, last: int | None) -> bool:
        """Write the entry where it is as it was seen; False where it is not."""
        sent = self._clock()
        value = msgspec.json.encode(self._own)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                with told(f"writing lease {self.key}"):
                    store = await self._store()
                    made = store.create(self.key, value) if last is None else store.update(self.key, value, last)
                    self._revision = await made
        except PlaneError as error:
            if error.fault in {"conflict", "missing"}:  # the latter where it expired within `create`
                return False
            raise
        except TimeoutError as error:
            raise self._unanswered("writing") from error
        self._until, self._lost = sent + self.seconds, ""
        return True

    async def _read(self) -> _Entry | None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                with told(f"reading lease {self.key}"):
                    found = await (await self._store()).get(self.key)
        except PlaneError as error:
            if error.fault == "missing" and self._found is not None:
                return None
            raise
        except TimeoutError as error:
            raise self._unanswered("reading") from error
        try:
            holder = msgspec.json.decode(found.value or b"", type=Holder)
        except msgspec.MsgspecError:
            holder = _NOBODY_KNOWN
        return _Entry(found.revision or 0, holder)

    async def _store(self) -> KeyValue:
        if self._found is None:
            self._found = await self._js.key_value(self._bucket)
        return self._found

    def _lose(self, why: str) -> bool:
        self._revision, self._lost = None, why
        return False

    def _unanswered(self, what: str) -> PlaneError:
        return PlaneError(
            f"{what} lease {self.key}: no answer in {ANSWER_SECONDS:g} s; look at the servers' load and whether a "
            "majority of them runs",
            fault="timeout",
        )
