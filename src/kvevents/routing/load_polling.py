"""Polls the HTTP servers of engines that publish no load.

Theory of operation. There is one task for each URL, even if several ranks have the same URL. In a loop, the task requests the
URL, reads the load of each rank from the answer, and sleeps. Each request has a time limit and a size limit, and at most
`at_once` run at a time, so a slow or hostile server affects only its own load. While requests to a server fail, the pauses
between them grow up to `MAX_PAUSE_SECONDS`. The reason for a failure is stored with each rank. The beginning and the end of a
failure are logged.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Final

from kvevents.backoff import Backoff, apply_jitter
from kvevents.prometheus import require_prometheus
from kvevents.routing.http_client import HttpConnections, HttpError, RequestLimits
from kvevents.routing.load_readings import MAX_METRICS_BYTES, LoadError, LoadSettings, RankLoad, ReportedLoad, check_load_url

_logger: Final = logging.getLogger(__name__)
MAX_PAUSE_SECONDS: Final = 2.0
"""Maximum pause in seconds after a failure, unless `poll_seconds` is longer."""
_IDLE_INTERVALS: Final = 4
"""Number of polling intervals for which an idle connection is kept open."""
_HEADERS: Final = {"Accept": "text/plain, application/json", "Accept-Encoding": "identity", "User-Agent": "kvevents"}


class _PolledServer:
    def __init__(self, url: str) -> None:
        self.url: Final = url
        self.ranks: list[RankLoad] = []
        self.task: asyncio.Task[None]

    def store(self, body: bytes, now: float) -> str:
        """Store the load of each rank. Return the fault of the first rank without a load; empty if all have a load."""
        report, fault = ReportedLoad.read(body), ""
        for readings in self.ranks:
            try:
                readings.store(report.of_rank(readings.source.rank), now)
            except LoadError as error:
                readings.reject(f"{self.url} {error}")
                fault = fault or str(error)
        return fault


class LoadPoller:
    """Polls URLs. All methods but the constructor are called in one running event loop.

    Raises `MissingDependencyError` if prometheus_client is not installed.
    """

    def __init__(self, settings: LoadSettings) -> None:
        require_prometheus("the load of vLLM needs")
        self._settings: Final = settings
        self._targets: dict[str, _PolledServer] = {}
        self._slots: Final = asyncio.Semaphore(settings.at_once)
        self._http: HttpConnections | None = None

    def add(self, readings: RankLoad) -> None:
        """Poll the URL of a source, and store the load of the source's rank from each answer."""
        url = check_load_url(readings.source.endpoint)
        if url not in self._targets:
            target = self._targets[url] = _PolledServer(url)
            target.task = asyncio.get_running_loop().create_task(self._poll(target))
        self._targets[url].ranks.append(readings)

    def remove(self, readings: RankLoad) -> None:
        """Stop polling for a rank. Does nothing if the rank is unknown."""
        url = check_load_url(readings.source.endpoint)
        target = self._targets.get(url)
        if target is None or readings not in target.ranks:
            return
        target.ranks.remove(readings)
        if not target.ranks:
            del self._targets[url]
            target.task.cancel()

    async def close(self) -> None:
        """End all requests."""
        tasks = [target.task for target in self._targets.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    async def _poll(self, target: _PolledServer) -> None:
        pause, former_fault = self._settings.poll_seconds, ""
        backoff = Backoff(initial=pause, maximum=max(pause, MAX_PAUSE_SECONDS))
        try:
            while True:
                fault = await self._request(target)
                if fault and not former_fault:
                    _logger.warning("the load of an engine is unknown: %s %s", target.url, fault)
                elif former_fault and not fault:
                    _logger.info("the load of an engine is known again: %s", target.url)
                former_fault = fault
                interval = self._settings.interval(len(self._targets))
                if fault:
                    await asyncio.sleep(max(interval, backoff.next_delay()))
                else:
                    backoff.reset()
                    await asyncio.sleep(apply_jitter(interval, random.random))
        except Exception:
            _logger.exception("polling %s has failed; its load is unknown from now on", target.url)
            for readings in target.ranks:  # a lasting fault would exclude the engine permanently
                readings.silence = ""

    async def _request(self, target: _PolledServer) -> str:
        """Request one answer and store its loads. Return the fault, or an empty text."""
        try:
            if self._http is None:
                limits = RequestLimits(self._settings.request_seconds, MAX_METRICS_BYTES)
                self._http = HttpConnections(limits, idle_seconds=_IDLE_INTERVALS * self._settings.poll_seconds)
            async with self._slots:
                answer = await self._http.get(target.url, _HEADERS)
            for readings in target.ranks:
                readings.has_answered, readings.silence = True, ""
            if not any(readings.source.reads_load for readings in target.ranks):
                return ""
            if answer.status == 200:
                return target.store(answer.body, time.monotonic())
            fault = f"answers with status {answer.status}"
        except HttpError as error:
            fault = f"does not answer: {error}" if error.kind != "timeout" else "does not answer in time"
            for readings in target.ranks:
                readings.silence = f"{target.url} {fault}" if readings.has_answered else ""
        except LoadError as error:
            fault = str(error)
        for readings in target.ranks:
            readings.reject(f"{target.url} {fault}")
        return fault
