"""Serves metrics to Prometheus, for programs without an HTTP server of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from kvevents.errors import EndpointError, MissingDependencyError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric


class Collector(Protocol):
    """Produces the metrics of a program. `collect` is called at each scrape, from a thread of its own."""

    def collect(self) -> Iterable[Metric]:
        """Return all metric families."""
        ...


def require() -> None:
    """Raise `MissingDependencyError` if the package that serves metrics is not installed."""
    try:
        import prometheus_client  # noqa: F401, PLC0415 - an extra
    except ImportError as error:
        raise MissingDependencyError("metrics need prometheus_client: pip install 'kvevents[service]'") from error


def registry(collector: Collector) -> CollectorRegistry:
    """Return a registry of the collector's metrics and of the process's. Raises `MissingDependencyError`."""
    require()
    from prometheus_client import CollectorRegistry, ProcessCollector  # noqa: PLC0415 - an extra

    found = CollectorRegistry()
    found.register(collector)
    ProcessCollector(registry=found)
    return found


def check(port: int, host: str) -> None:
    """Raise `EndpointError` if metrics cannot be served at this address now."""
    serve(_EmptyCollector(), port, host)()


class _EmptyCollector:
    def collect(self) -> Iterable[Metric]:
        """Return no metric families."""
        return ()


def serve(collector: Collector, port: int, host: str = "127.0.0.1") -> Callable[[], None]:
    """Serve metrics until the returned function is called. Raises `EndpointError`."""
    found = registry(collector)
    from prometheus_client import start_http_server  # noqa: PLC0415 - an extra

    try:
        server, thread = start_http_server(port, host, found)
    except OSError as error:
        raise EndpointError(
            error.errno, f"cannot serve metrics at {host}:{port}: {error.strerror}; choose another port"
        ) from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
