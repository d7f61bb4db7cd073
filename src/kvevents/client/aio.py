"""The asyncio client of a service, by aiohttp."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from kvevents.client import protocol, schemas
from kvevents.client.protocol import OK, Attempts, Call, Endpoint, RetryPause, ServiceRequestError
from kvevents.closeable import AsyncCloseable
from kvevents.routing.http_client import HttpConnections, HttpError, RequestLimits

T = TypeVar("T")


class AsyncClient(AsyncCloseable):
    """A client of one service, for the tasks of one event loop; also a context manager, which closes its connections.

    `deadline` is the time in seconds for a call with all its attempts; the argument `deadline` of a method replaces it.
    `retries` is the maximum number of attempts after the first. Every method raises `ServiceRequestError`.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca_file: Path | None = None,
        deadline: float = protocol.DEADLINE_SECONDS,
        retries: int = protocol.MAX_RETRIES,
        max_response_bytes: int = protocol.MAX_RESPONSE_BYTES,
    ) -> None:
        self.url = url
        self._endpoint = Endpoint(url, token, ca_file, max_response_bytes)
        self._deadline = deadline
        self._retries = retries
        self._connections: HttpConnections | None = None

    async def close(self) -> None:
        """Close all connections, and abort open calls. Later calls open new connections."""
        connections, self._connections = self._connections, None
        if connections is not None:
            await connections.close()

    # --- prompts

    async def match(self, request: schemas.MatchRequest, *, deadline: float | None = None) -> schemas.MatchAnswer:
        """Return how many tokens of a prompt each worker holds."""
        return await self.send(protocol.match(request), deadline=deadline)

    async def match_many(self, request: schemas.MatchManyRequest, *, deadline: float | None = None) -> schemas.MatchManyAnswer:
        """Return, for several prompts, how many tokens of each prompt each worker holds."""
        return await self.send(protocol.match_many(request), deadline=deadline)

    async def select(self, request: schemas.SelectRequest, *, deadline: float | None = None) -> schemas.Selection:
        """Return the worker that should take a prompt."""
        return await self.send(protocol.select(request), deadline=deadline)

    def reserve(self, request: schemas.SelectRequest, *, deadline: float | None = None) -> AsyncReservedWorker:
        """Return a context manager that selects a worker. Within the context, the prompt counts as load of the worker."""
        return AsyncReservedWorker(self, protocol.with_reservation_name(request), deadline)

    async def reservation(self, name: str, *, deadline: float | None = None) -> schemas.Reservation:
        """Return an open reservation."""
        return await self.send(protocol.reservation(name), deadline=deadline)

    # --- the fleet

    async def sources(self, *, deadline: float | None = None, **filters: str) -> schemas.SourcesAnswer:
        """Return the sources that have the given `instance`, `model`, `tenant` and `group`; without filters, all sources."""
        return await self.send(protocol.sources(filters), deadline=deadline)

    async def register(self, request: schemas.RegisterRequest, *, deadline: float | None = None) -> Mapping[str, Any]:
        """Register a rank of an engine, and return the service's answer."""
        return await self.send(protocol.register(request), deadline=deadline)

    async def unregister(self, request: schemas.UnregisterRequest, *, deadline: float | None = None) -> Mapping[str, Any]:
        """Unregister an engine, or one of its ranks, and return the service's answer."""
        return await self.send(protocol.unregister(request), deadline=deadline)

    async def drain(self, request: schemas.DrainRequest, *, deadline: float | None = None) -> schemas.DrainAnswer:
        """Exclude an engine or one rank from selections, or include it again. In both cases the service follows the engine."""
        return await self.send(protocol.drain(request), deadline=deadline)

    async def ready(self, *, deadline: float | None = None) -> schemas.ReadyAnswer:
        """Return whether the service is ready for queries; if it is not, the answer says why."""
        return await self.send(protocol.ready(), deadline=deadline)

    async def wait_ready(self, seconds: float = 60.0) -> schemas.ReadyAnswer:
        """Wait until the service is ready for queries. Raises `ServiceRequestError` after `seconds`."""
        wait = protocol.ReadyWait(seconds, time.monotonic)
        while True:
            try:
                return wait.check(await self.ready(deadline=wait.seconds_left))
            except ServiceRequestError as error:
                wait.check_error(error)
            await asyncio.sleep(protocol.READY_POLL_SECONDS)

    # --- transport

    async def get(
        self, path: str, kind: type[T], parameters: Mapping[str, str] | None = None, *, accepted_status: int = OK
    ) -> T:
        """Send a GET request, and return the response as `kind`. The status must be 200 or `accepted_status`."""
        return await self.send(protocol.get(path, kind, parameters, accepted_status=accepted_status))

    async def send(self, call: Call[T], *, deadline: float | None = None) -> T:
        """Send a call, with further attempts if necessary, and return its response."""
        seconds = self._deadline if deadline is None else deadline
        attempts = Attempts(self._endpoint, call, deadline=seconds, retries=self._retries, now=time.monotonic)
        while True:
            try:
                outcome = attempts.on_answer(*await self._exchange(call, attempts.seconds))
            except HttpError as error:
                outcome = attempts.on_error(error.kind, str(error))
            if not isinstance(outcome, RetryPause):
                return outcome
            await asyncio.sleep(outcome.seconds)

    async def _exchange(self, call: Call[Any], seconds: float) -> tuple[int, bytes]:
        endpoint = self._endpoint
        if self._connections is None:
            limits = RequestLimits(self._deadline, endpoint.max_bytes)
            self._connections = HttpConnections(limits, tls=endpoint.tls, idle_seconds=protocol.MAX_IDLE_SECONDS)
        request = call.method, endpoint.base + call.path, endpoint.headers, call.body
        answer = await self._connections.send(*request, seconds=seconds, is_repeatable=call.is_repeatable)
        return answer.status, answer.body


class AsyncReservedWorker(protocol.ReservedWorkerBase[AsyncClient]):
    """A reserved worker. Until this context ends, even by an error, the request counts as load of the worker."""

    async def __aenter__(self) -> Self:
        try:
            self.selection = await self._client.select(self._request, deadline=self._deadline)
        except BaseException as error:
            if protocol.request_may_have_run(error):
                await self._finish(protocol.FINISH_SECONDS)
            raise
        if self.selection.reservation is None:
            raise protocol.unusable_selection_error(self.selection)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._finish()

    async def first_token(self) -> schemas.Reservation | None:
        """Report the first token of the answer, and return the reservation; None if the report failed."""
        return await self._send(protocol.update(self.id, schemas.ReservationUpdate(first_token=True)))

    async def output(self, tokens: int) -> schemas.Reservation | None:
        """Report the number of generated tokens, and return the reservation; None if the report failed."""
        return await self._send(protocol.update(self.id, schemas.ReservationUpdate(output_tokens=tokens)))

    async def _finish(self, deadline: float | None = None) -> None:
        """End the reservation. If the task is cancelled during this request, the request goes on."""
        request = self._send(protocol.finish(self.id), deadline)
        await asyncio.shield(asyncio.ensure_future(request))

    async def _send(self, call: Call[T], deadline: float | None = None) -> T | None:
        try:
            return await self._client.send(call, deadline=deadline)
        except ServiceRequestError:
            return None
