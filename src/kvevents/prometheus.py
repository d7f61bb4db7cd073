"""Metric families, and a server of metrics for programs without an HTTP server of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

from kvevents.errors import EndpointError, MissingDependencyError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

T = TypeVar("T")
Samples: TypeAlias = "float | Iterable[tuple[dict[str, str], float | None]] | None"
"""One value, or values with their labels. A value of None is unknown, and is not exported."""
MetricTable: TypeAlias = Mapping[str, tuple[str, Callable[[T], Samples]]]
"""Maps a metric's name to its help text and to the function that reads its samples from a status. A counter's name ends
with `_total`."""


def families(prefix: str, table: MetricTable[T], status: T) -> Iterable[Metric]:
    """Yield the metric families of a table; each name begins with `prefix`."""
    for name, (text, read_value) in table.items():
        yield family(prefix + name, text, read_value(status))


def family(name: str, text: str, samples: Samples) -> Metric:
    """Return a metric family: a counter if its name ends with `_total`, else a gauge."""
    from prometheus_client.metrics_core import Metric  # noqa: PLC0415 - the package belongs to an extra

    metric = Metric(name.removesuffix("_total"), text, "counter" if name.endswith("_total") else "gauge")
    for labels, value in label_samples(samples):
        if value is not None:
            metric.add_sample(name, labels, value)
    return metric


def label_samples(samples: Samples) -> Iterable[tuple[dict[str, str], float | None]]:
    """Return samples with their labels; a single value has no labels."""
    return samples if isinstance(samples, Iterable) else [({}, samples)]


def samples_by_label(label: str, values: Mapping[str, float | None]) -> Samples:
    """Return one sample for each item of `values`, with the key of the item as value of the label."""
    return [({label: name}, value) for name, value in values.items()]


def state_set(label: str, names: Iterable[str], current: str) -> Samples:
    """Return a sample for every name: 1 for the current name, 0 for the others."""
    return samples_by_label(label, {name: name == current for name in names})


def require_prometheus(subject: str = "metrics need") -> None:
    """Raise `MissingDependencyError` if prometheus_client is not installed; the message begins with `subject`."""
    if find_spec("prometheus_client") is None:
        raise MissingDependencyError(f"{subject} prometheus_client", "service")


def make_registry(collect: Callable[[], Iterable[Metric]]) -> CollectorRegistry:
    """Return a registry of the metrics of a program and of its process. Raises `MissingDependencyError`.

    `collect` returns all metric families. Each scrape calls `collect` in a separate thread.
    """
    require_prometheus()
    from prometheus_client import CollectorRegistry, ProcessCollector  # noqa: PLC0415 - the package belongs to an extra

    metrics = CollectorRegistry()
    metrics.register(_Collector(collect))
    ProcessCollector(registry=metrics)
    return metrics


class _Collector:
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self.collect: Final = collect


class Probes(NamedTuple):
    """Functions for the probes of Kubernetes. Each function returns why its probe fails, or "" if the probe succeeds."""

    live: Callable[[], str]
    """Returns why the process must be restarted, for `/livez`."""
    ready: Callable[[], str]
    """Returns why the process cannot do its work, for `/readyz`."""


def check_address(port: int, host: str) -> None:
    """Raise `EndpointError` if metrics cannot be served at this address now."""
    serve(tuple, port, host, Probes(str, str))()


def serve(collect: Callable[[], Iterable[Metric]], port: int, host: str, probes: Probes) -> Callable[[], None]:
    """Serve the metrics of `make_registry` and the probes until the returned function is called. Raises `EndpointError`."""
    metrics = make_registry(collect)
    from prometheus_client import start_http_server  # noqa: PLC0415 - the package belongs to an extra

    try:
        server, thread = start_http_server(port, host, metrics)
    except OSError as error:
        sentence = f"cannot serve metrics at {host}:{port}: {error.strerror}; choose another port"
        raise EndpointError(error.errno, sentence) from error

    server.set_app(_with_probes(server.get_app(), probes))

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def _with_probes(metrics: Any, probes: Probes) -> Callable[..., Iterable[bytes]]:
    """Return a WSGI application that answers `/livez` and `/readyz`, and passes on all other requests."""
    probe_of_path = {"/livez": probes.live, "/readyz": probes.ready}

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        probe = probe_of_path.get(environ["PATH_INFO"])
        if probe is None:
            return metrics(environ, start_response)  # type: ignore[no-any-return]
        fault = probe()
        start_response("503 Service Unavailable" if fault else "200 OK", [("Content-Type", "text/plain; charset=utf-8")])
        return [(fault or "ok").encode() + b"\n"]

    return answer
