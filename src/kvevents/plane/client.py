"""nats-py's client, with what a process that runs for months needs of it besides.

What is different, each for what nats-py 2.16 (`nats/aio/client.py`) does:

- Where TLS is wanted, a server that does not offer it is told nothing. nats-py goes by the server's word alone, so anybody in
  between could have the login in plain text.
- Whatever a server says when it ends a connection, such as that a login has expired, the client comes back. nats-py would close
  for good.
- A connection that was given up is cut. nats-py waits until all that was written is taken, which a stopped server never does,
  and comes back to no other server meanwhile.
- Who waits to publish can be cancelled. nats-py swallows that, and waits on. So can who waits for an answer that comes in the
  same moment, of which Python 3.11's `asyncio.wait_for` makes that nobody was cancelled.
- A request that the server forbids ends at once, and says so. nats-py lets it run into its timeout.
- A server that answers with something else than NATS is one more attempt that failed. nats-py tries no more when, for one, its
  first line is too long.
- Servers that have left the cluster are forgotten.

Most of this overrides private methods, so `pyproject.toml` allows no other minor release of nats-py. For a newer one, compare
these methods with its `client.py`, and run `test_plane_client.py` and `test_plane_connection.py` of `tests/integration`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Final

from nats import errors
from nats.aio.client import Client, Srv
from nats.aio.msg import Msg
from nats.protocol.parser import PERMISSIONS_ERR

_REFUSED_SUBJECT: Final = re.compile(r'publish to "(.*?)"')
_WEB: Final = ("ws", "wss")


class NotPermittedError(errors.AuthorizationError):
    """The server does not let this user publish there."""

    def __init__(self, subject: str) -> None:
        super().__init__(subject)
        self.subject = subject

    def __str__(self) -> str:
        return f"this user may not publish to {self.subject!r}"


class PlaneClient(Client):
    """A client that stays; `kvevents.plane.connection.connect` makes one."""

    def __init__(self, *, needs_tls: bool = False) -> None:
        super().__init__()
        self._needs_tls = needs_tls
        self._asking: dict[asyncio.Timeout, str] = {}

    def add_servers(self, addresses: Sequence[str]) -> None:
        """More servers to go to when the present one is away."""
        known = {server.uri.netloc for server in self._server_pool}
        found = [self._parse_server_uri(address) for address in addresses]
        self._server_pool += [Srv(uri) for uri in found if uri.netloc not in known]

    def abandon(self) -> None:
        """Cut the connection and forget what is still to be sent; `close` then waits for nothing."""
        self._cut()
        self._transport = None
        self._pending.clear()
        self._pending_data_size = 0

    def _cut(self) -> None:
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,  # noqa: ASYNC109 - nats-py's signature
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """As nats-py's; raises `NotPermittedError` at once where the server forbids it."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._asking[limit] = subject
                before = _cancellations()
                try:
                    answer = await super().request(subject, payload, timeout, old_style, headers)
                finally:
                    del self._asking[limit]
                if _cancellations() > before:
                    raise asyncio.CancelledError
                return answer
        except TimeoutError as error:
            if limit.expired():
                raise NotPermittedError(subject) from error
            raise

    # --- what nats-py calls ------------------------------------------------------------------------------------------------

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        upgrades = self._current_server is not None and self._current_server.uri.scheme not in _WEB
        if initial_connection and upgrades and self._needs_tls and not info.get("tls_required"):
            raise errors.SecureConnWantedError
        if listed := info.get("connect_urls"):
            self._server_pool = [each for each in self._server_pool if not each.discovered or each.uri.netloc in listed]
        await super()._process_info(info, initial_connection)

    async def _process_err(self, err_msg: str) -> None:
        if PERMISSIONS_ERR in err_msg:
            self._refuse(err_msg)
            await super()._process_err(err_msg)
            return
        error = errors.Error(f"nats: the server said {err_msg}")
        await self._error_cb(error)
        await self._process_op_err(error)

    def _refuse(self, message: str) -> None:
        """End requests of which the server has said, in small letters, that they are not permitted."""
        found = _REFUSED_SUBJECT.search(message)
        for limit, subject in list(self._asking.items()):
            if found is not None and subject.lower() == found[1]:
                limit.reschedule(0)

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        before = _cancellations()
        found = await super()._flush_pending(force_flush)
        if _cancellations() > before:
            raise asyncio.CancelledError
        return found

    async def _connect_to_server(self, s: Srv) -> None:
        self._cut()
        await super()._connect_to_server(s)

    async def _attempt_reconnect(self) -> None:
        while True:
            self._cut()
            try:
                return await super()._attempt_reconnect()
            except Exception as error:  # noqa: BLE001 - any that nats-py does not expect of a server would end its attempts
                await self._error_cb(error)


def _cancellations() -> int:
    """How often somebody has asked the present task to end."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
