"""Metrics for Prometheus, of processes that have no HTTP server of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from kvevents.errors import EndpointError, MissingDependencyError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric


class Collector(Protocol):
    """What is asked whenever somebody scrapes, from a thread of its own."""

    def collect(self) -> Iterable[Metric]:
        """Every family."""
        ...


def require() -> None:
    """Raise `MissingDependencyError` if the package that serves metrics is not installed."""
    try:
        import prometheus_client  # noqa: F401, PLC0415 - an extra
    except ImportError as error:
        raise MissingDependencyError("metrics need prometheus_client: pip install 'kvevents[service]'") from error


def registry(collector: Collector) -> CollectorRegistry:
    """A registry of this and of the process. Raises `MissingDependencyError`."""
    require()
    from prometheus_client import CollectorRegistry, ProcessCollector  # noqa: PLC0415 - an extra

    found = CollectorRegistry()
    found.register(collector)
    ProcessCollector(registry=found)
    return found


def check(port: int, host: str) -> None:
    """Raise `EndpointError` if scrapes could not be answered at a port now."""
    serve(_Nothing(), port, host)()


class _Nothing:
    def collect(self) -> Iterable[Metric]:
        """No families."""
        return ()


def serve(collector: Collector, port: int, host: str = "127.0.0.1") -> Callable[[], None]:
    """Answer scrapes at a port until the function that is returned is called. Raises `EndpointError`."""
    found = registry(collector)
    from prometheus_client import start_http_server  # noqa: PLC0415 - an extra

    try:
        server, thread = start_http_server(port, host, found)
    except OSError as error:
        raise EndpointError(
            error.errno, f"cannot serve metrics at {host}:{port}: {error.strerror}; choose another port"
        ) from error

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end
