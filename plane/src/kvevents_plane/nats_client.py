"""nats-py's client, extended for a process that runs for months.

Differences from nats-py 2.16 (`nats/aio/client.py`):

- If TLS is required, the client sends nothing to a server that does not offer it. nats-py relies on the server's INFO alone, so
  an attacker between client and server could read the credentials.
- If a server ends a connection, the client reconnects for any reason, such as expired credentials. nats-py would close.
- The client aborts a connection that it has given up. nats-py first waits until the old server has read all written data, which
  a stopped server never does.
- `close` does not wait for the server, and ends all attempts to reconnect. nats-py cancels the task of these attempts once. If
  an attempt fails at that moment, `asyncio.wait_for` of Python 3.11 swallows the cancellation, and the closed client
  reconnects.
- A task that waits to publish can be cancelled; nats-py swallows the cancellation. A task that waits for an answer can be
  cancelled at the moment at which the answer arrives; `asyncio.wait_for` of Python 3.11 swallows the cancellation.
- A request that the server forbids fails at once. nats-py waits for the timeout.
- A server that does not speak the NATS protocol counts as one failed attempt. nats-py would stop reconnecting, for example
  after a first line that is too long.

Some of these differences override private methods of nats-py, so `pyproject.toml` allows only one minor release. To allow a
newer release, compare these methods with the release's `client.py`, and run `tests/integration/test_plane_connection.py`. ADR
0036 compares the alternatives.
"""

from __future__ import annotations

import asyncio
import re
from asyncio import StreamWriter
from collections.abc import Sequence
from typing import Any, Final

from nats import errors
from nats.aio.client import Client, Srv
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport
from nats.protocol.parser import PERMISSIONS_ERR

from kvevents_plane.nats_errors import keep_cancellation

_FORBIDDEN_SUBJECT: Final = re.compile(r'publish to "(.*?)"')


class NotPermittedError(errors.AuthorizationError):
    """Raised if the server does not permit this user to publish to a subject."""

    def __str__(self) -> str:
        return f"this user must not publish to {self.args[0]!r}"


class PlaneClient(Client):
    """A client that reconnects until it is closed; `kvevents_plane.connection.connect` creates it."""

    def __init__(self, *, needs_tls: bool = False) -> None:
        super().__init__()
        self._needs_tls = needs_tls
        self._requests: dict[asyncio.Timeout, str] = {}
        self._is_closing = False

    def add_servers(self, addresses: Sequence[str]) -> None:
        """Add servers to use if the current one is unreachable. nats-py's `set_server_pool` forgets the server's version."""
        known = {server.uri.netloc for server in self._server_pool}
        uris = [self._parse_server_uri(address) for address in addresses]
        self._server_pool += [Srv(uri) for uri in uris if uri.netloc not in known]

    async def close(self) -> None:
        """Close the connection at once. Unsent data is dropped; call `flush` first to send it."""
        self._is_closing = True
        while (task := self._reconnection_task) is not None and task is not asyncio.current_task() and not task.done():
            task.cancel()
            await asyncio.sleep(0)
        self._abort_transport()
        self._transport = None  # so that nats-py does not wait for the end of a TLS handshake that has failed
        self._pending.clear()
        self._pending_data_size = 0
        await super().close()

    def _abort_transport(self) -> None:
        match self._transport:
            case TcpTransport(_io_writer=StreamWriter() as writer):
                writer.transport.abort()

    async def publish(self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, Any] | None = None) -> None:
        """Publish as nats-py does, but raise the cancellation if the task is cancelled while it waits for the socket."""
        with keep_cancellation():
            await super().publish(subject, payload, reply, headers)

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,  # noqa: ASYNC109 - nats-py has this parameter
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """Send a request as nats-py does, but raise `NotPermittedError` at once if the server forbids it."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._requests[limit] = subject
                try:
                    with keep_cancellation():
                        return await super().request(subject, payload, timeout, old_style, headers)
                finally:
                    del self._requests[limit]
        except TimeoutError as error:
            if limit.expired():
                raise NotPermittedError(subject) from error
            raise

    # --- overridden methods of nats-py
    # ------------------------------------------------------------------------------------------------

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and self._needs_tls and not info.get("tls_required"):
            raise errors.SecureConnWantedError
        await super()._process_info(info, initial_connection)

    async def _process_err(self, err_msg: str) -> None:
        if PERMISSIONS_ERR in err_msg:
            forbidden = _FORBIDDEN_SUBJECT.search(err_msg)
            for limit, subject in list(self._requests.items()):
                if forbidden is not None and subject.lower() == forbidden[1]:  # the server reports the subject in lower case
                    limit.reschedule(0)
            await super()._process_err(err_msg)
            return
        error = errors.Error(f"nats: the server reported {err_msg}")
        await self._error_cb(error)
        await self._process_op_err(error)

    async def _connect_to_server(self, s: Srv) -> None:
        self._abort_transport()
        await super()._connect_to_server(s)

    async def _attempt_reconnect(self) -> None:
        while not self._is_closing:
            self._abort_transport()
            try:
                await super()._attempt_reconnect()
            except Exception as error:  # noqa: BLE001 - an unexpected error would end nats-py's attempts
                await self._error_cb(error)
            else:
                return
