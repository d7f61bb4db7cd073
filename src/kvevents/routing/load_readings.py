"""Loads of engines: settings, sources, the newest reading of each source, and the metrics that are read.

An HTTP server reports load in the Prometheus metrics of vLLM and SGLang, and in vLLM's `/load`.

vLLM publishes no load. vLLM's server has `/metrics` unless it was started with `--disable-log-stats`
(`vllm/v1/metrics/loggers.py`); each series has the data-parallel rank in the label `engine`. The names of the metrics are equal
in all releases from 0.11 to 0.33; releases up to 0.11 also have the older `vllm:gpu_cache_usage_perc`. `/load` returns
`{"server_load": n}`: the number of requests at this server process (`vllm/entrypoints/serve/instrumentator/basic.py`), which
stays 0 unless the server has the option `--enable-server-load-tracking`. SGLang's server has `/metrics` with `--enable-metrics`
(`sglang/srt/observability/metrics_collector.py`).
"""

# This module has no `from __future__ import annotations`, for the reason that `kvevents.client.schemas` states.
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from kvevents.endpoints import HTTP_SCHEMES, split_url, validate_endpoint
from kvevents.errors import ConfigError, ExternalError
from kvevents.prometheus import require_prometheus
from kvevents.routing.policy_types import Worker
from kvevents.settings import Positive, Range, Seconds, Settings, Unit, build_decoder_now
from kvevents.wire.load import LOAD_TOPIC, EngineLoad
from kvevents.zeromq.keys import Curve

_logger: Final = logging.getLogger(__name__)

MAX_METRICS_BYTES: Final = 4 << 20
"""Maximum size of an answer in bytes. The answer of a vLLM server with two ranks has 80 kB."""
MAX_SERIES: Final = 4_096
"""Maximum number of time series about load in one answer. Each rank has a few time series."""
METRICS_PATH: Final = "/metrics"
_CACHE_INFO_METRIC: Final = "vllm:cache_config_info"
_CAPACITY_LABELS: Final = re.compile(r'[{,](engine|num_gpu_blocks|block_size)="([^"]*)"')
"""Labels of `_CACHE_INFO_METRIC` that are read. Parsing all labels of this series takes three times as long as parsing all
other series."""


class LoadError(ExternalError):
    """An answer from which no load can be read. The message says what is wrong with the answer, as the end of a sentence."""


class _MetricNames(NamedTuple):
    running: str
    waiting: str
    rank: str
    """Name of the label that has the data-parallel rank."""
    usage: tuple[str, ...]
    """Metrics for the share of the KV cache in use, 0 to 1; the first metric that is present counts."""
    used: str | None = None
    """Metric for the number of tokens in use."""
    capacity: str | None = None
    """Metric for the capacity in tokens."""
    cache_info: str | None = None
    """A metric with the labels `num_gpu_blocks` and `block_size`, whose product is the capacity."""


_VLLM: Final = _MetricNames(
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "engine",
    ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    cache_info=_CACHE_INFO_METRIC,
)
_SGLANG: Final = _MetricNames(
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "dp_rank",
    ("sglang:token_usage",),
    used="sglang:num_used_tokens",
    capacity="sglang:max_total_num_tokens",
)
_NAMES_OF_ENGINES: Final = (_VLLM, _SGLANG)


def _list_names() -> Iterable[str]:
    for names in _NAMES_OF_ENGINES:
        optional = (names.used, names.capacity, names.cache_info)
        yield from (names.running, names.waiting, *names.usage, *(name for name in optional if name is not None))


_METRIC_LINES: Final = re.compile(rb"\n(%b)([ \t{][^\n]*)" % b"|".join(re.escape(name.encode()) for name in _list_names()))
"""Matches lines of metrics about load. All other lines, which are more than nine tenths of an answer, are not parsed."""


class _Sample(NamedTuple):
    labels: Mapping[str, str]
    value: float


@build_decoder_now
class _ServerLoad(msgspec.Struct):
    server_load: int


class ReportedLoad:
    """The load of the ranks in one answer of an engine's HTTP server."""

    def __init__(self, series: Mapping[str, list[_Sample]], server_load: int | None = None) -> None:
        self._series: Final = series
        self._server_load: Final = server_load

    @classmethod
    def read(cls, body: bytes) -> "ReportedLoad":
        """Read the body of `/metrics` or `/load`.

        Raises `LoadError`, and `MissingDependencyError` without prometheus_client.
        """
        if body.lstrip()[:1] == b"{":
            try:
                return cls({}, _to_count(msgspec.json.decode(body, type=_ServerLoad).server_load))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise LoadError(f"is neither metrics nor vLLM's /load: {error}") from error
        lines: list[tuple[bytes, bytes]] = _METRIC_LINES.findall(b"\n" + body)
        if len(lines) > MAX_SERIES:
            raise LoadError(f"has more than {MAX_SERIES} series of load")
        infos = [fields.decode(errors="replace") for name, fields in lines if name == _CACHE_INFO_METRIC.encode()]
        others = [name + fields for name, fields in lines if name != _CACHE_INFO_METRIC.encode()]
        series = {_CACHE_INFO_METRIC: [_Sample(dict(_CAPACITY_LABELS.findall(info)), 1.0) for info in infos]}
        for name, labels, value in _parse_metrics(b"\n".join(others)):
            series.setdefault(name, []).append(_Sample(labels, value))
        return cls(series)

    def of_rank(self, rank: int) -> EngineLoad:
        """Return the load of a data-parallel rank. If there is only one rank, its number is ignored. Raises `LoadError`."""
        if self._server_load is not None:
            return EngineLoad(running=self._server_load, waiting=0, used_tokens=0, max_tokens=0)
        names = next((names for names in _NAMES_OF_ENGINES if {names.running, names.waiting} & self._series.keys()), None)
        if names is None:
            raise LoadError(f"has no {_VLLM.running} and no {_SGLANG.running}")
        running, waiting = self._value_of(names, names.running, rank), self._value_of(names, names.waiting, rank)
        if running is None or waiting is None:
            raise LoadError(f"has no {names.running if running is None else names.waiting} of rank {rank}")
        capacity = self._capacity_of(names, rank)
        used = None if names.used is None else self._value_of(names, names.used, rank)
        usage = next((value for name in names.usage if (value := self._value_of(names, name, rank)) is not None), 0.0)
        return EngineLoad(
            running=_to_count(running),
            waiting=_to_count(waiting),
            used_tokens=_to_count(usage * capacity if used is None else used),
            max_tokens=_to_count(capacity),
            rank=rank,
        )

    def _capacity_of(self, names: _MetricNames, rank: int) -> float:
        if names.capacity is not None:
            return self._value_of(names, names.capacity, rank) or 0.0
        for row in self._series_of(names, names.cache_info or "", rank):
            blocks, size = row.labels.get("num_gpu_blocks", ""), row.labels.get("block_size", "")
            if _is_number(blocks) and _is_number(size):
                return float(blocks) * float(size)
        return 0.0

    def _value_of(self, names: _MetricNames, name: str, rank: int) -> float | None:
        """Return the value of a metric for a rank; the largest value if the rank has several series."""
        return max((row.value for row in self._series_of(names, name, rank)), default=None)

    def _series_of(self, names: _MetricNames, name: str, rank: int) -> list[_Sample]:
        ranks = {row.labels.get(names.rank) for row in self._series.get(names.running, ())}
        labels = ranks if len(ranks) == 1 else {str(rank)}
        return [row for row in self._series.get(name, ()) if row.labels.get(names.rank) in labels]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 16


def _to_count(value: float) -> int:
    if not 0 <= value <= 1 << 53:  # above this limit a double cannot represent every integer
        raise LoadError(f"has the number {value:g} where a count is expected")
    return round(value)


def _parse_metrics(text: bytes) -> Iterable[tuple[str, Mapping[str, str], float]]:
    require_prometheus("the load of vLLM needs")
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - the package belongs to an extra

    try:
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                if not math.isfinite(sample.value):
                    raise LoadError(f"has {sample.name} {sample.value}")
                yield sample.name, sample.labels, sample.value
    except (ValueError, KeyError, IndexError) as error:  # the parser defines no error type
        raise LoadError(f"is not in the text format of Prometheus: {error}") from error


def is_load_url(text: str) -> bool:
    """Return whether a setting `load` is the URL of an HTTP server rather than the endpoint of a socket."""
    return text.startswith(("http://", "https://"))


def check_load_url(text: str) -> str:
    """Return the URL to poll, with the path `/metrics` if the given URL has none. Raises `ConfigError` for an invalid URL."""
    parts = split_url(text, HTTP_SCHEMES)
    if parts is None or parts.fragment or not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError(f"invalid load {text!r}: expected http://HOST:PORT or https://HOST:PORT, optionally with a path")
    return parts._replace(path=METRICS_PATH).geturl() if parts.path in {"", "/"} else text


# --- settings, sources and readings

OnLoad: TypeAlias = Callable[[Worker, EngineLoad], None]
"""Function that is called with each load that arrives, in the thread that received the load. The function must not block."""
MAX_AGE_SECONDS: Final = 3_600.0


class LoadSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for reading the load of engines. Raises `ConfigError`."""

    max_age_seconds: Annotated[float, Unit.SECONDS, Range(0, MAX_AGE_SECONDS, is_open=True)] = 5.0
    """Seconds after which the newest load of an engine counts as unknown. SGLang repeats an unchanged load every second, but a
    step of a large prompt delays a report by a few seconds."""
    poll_seconds: Annotated[float, Unit.SECONDS, Range(0, MAX_AGE_SECONDS, is_open=True)] = 1.0
    """Seconds between two requests to a server that is polled, such as vLLM's `/metrics`. Each request costs the server some
    milliseconds."""
    resolve_seconds: Seconds = 5.0
    """Seconds without a message after which the host name of an engine that publishes load is resolved again, because its
    address may have changed. The time doubles with each further lookup, up to a minute."""
    request_seconds: Seconds = 1.5
    """Time limit of one answer in seconds. If a server stops answering, `/v1/select` stops selecting it, by default within 3 s:
    one pause and the time for one answer."""
    at_once: Positive = 64
    """Maximum number of concurrent requests."""
    polls_per_second: Positive = 500
    """Maximum number of requests per second to all servers. Each request takes about 0.4 ms of CPU. If this limit is too low
    for all servers, `poll_seconds` grows, up to four fifths of `max_age_seconds`."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.poll_seconds >= self.max_age_seconds:
            raise ConfigError(
                f"invalid poll_seconds {self.poll_seconds:g}: expected less than max_age_seconds ({self.max_age_seconds:g}), "
                "since a load would be unknown before the next one is requested"
            )

    def interval(self, servers: int) -> float:
        """Return the seconds between two requests to the same server if `servers` servers are polled."""
        max_interval = max(self.poll_seconds, 0.8 * self.max_age_seconds)
        return min(max(self.poll_seconds, servers / self.polls_per_second), max_interval)


class LoadSource(Struct, frozen=True):
    """The place from which the load of one rank is read."""

    endpoint: str
    """Endpoint at which the rank publishes its load, such as `tcp://10.0.0.7:5559`: SGLang's `load_endpoint_port_base` plus the
    rank. The endpoint can also be a URL to poll: that of a server with the `/metrics` of vLLM or SGLang, such as `http://10.0.0.7:8000`,
    or of vLLM's `/load`. All ranks behind one server have the same URL."""
    name: str
    """Name of the engine, as in `Source.name`."""
    rank: int = 0
    topic: str = LOAD_TOPIC
    """Prefix of the topics to subscribe to."""
    curve: Curve | None = None
    reads_load: bool = True
    """Whether the load is read from the answers. If false, answers only show that the server works (`LoadReading.silence`)."""

    def __post_init__(self) -> None:
        if is_load_url(self.endpoint):
            check_load_url(self.endpoint)
        else:
            validate_endpoint(self.endpoint)
        if self.rank < 0:
            raise ConfigError(f"invalid rank {self.rank} of {self.name}: expected a number from 0")

    @property
    def worker(self) -> Worker:
        """Name and rank."""
        return self.name, self.rank


class LoadReading(Struct, frozen=True):
    """The newest load of one rank, and counters of its messages."""

    load: EngineLoad | None
    """The newest load; None if no load has arrived, or if the newest load is older than `max_age_seconds`."""
    age: float | None
    """Seconds since the newest load has arrived; None before the first load."""
    received: int
    """Number of loads that have arrived."""
    rejected: int
    """Number of messages and of answers to requests in which no load was found."""
    fault: str
    """Why the newest load is unknown; empty if it is known."""
    silence: str = ""
    """Why a server has stopped answering; empty if it answers, or if it has never answered."""


class RankLoad:
    """The newest load of one rank. One thread writes the object, and any thread reads it: a field is replaced as a whole."""

    def __init__(self, source: LoadSource, on_load: OnLoad | None = None) -> None:
        self.source: Final = source
        self._on_load: Final = on_load
        self._logged_error = ""
        self.received = 0
        self.rejected = 0
        self.fault = ""
        """Why the last request returned no load; empty if it returned a load."""
        self.has_answered = False
        """Whether the server has ever answered."""
        self.silence = ""
        """Why the server has stopped answering; empty if it answers, or if it has never answered."""
        self._newest: tuple[EngineLoad, float] | None = None

    def store(self, load: EngineLoad, now: float) -> None:
        """Store a load that has just arrived."""
        self.received += 1
        self._newest = load, now
        self.fault = ""
        if self._on_load is not None:
            try:
                self._on_load(self.source.worker, load)
            except Exception as error:  # an error in `on_load` must not end the thread that receives all loads
                if self._logged_error != repr(error):
                    self._logged_error = repr(error)
                    _logger.exception("on_load has failed for a load of %s rank %d", *self.source.worker)

    def reject(self, fault: str = "") -> None:
        """Count a message, or the answer to a request, in which no load was found."""
        self.rejected += 1
        self.fault = fault

    def load(self, now: float, max_age: float) -> EngineLoad | None:
        """Return the newest load; None if no load has arrived, or if the newest load is older than `max_age` seconds."""
        newest = self._newest
        return None if newest is None or now - newest[1] > max_age else newest[0]

    def reading(self, now: float, max_age: float) -> LoadReading:
        """Return the newest load with its age."""
        newest = self._newest
        age = None if newest is None else max(now - newest[1], 0.0)
        load = None if newest is None or age is None or age > max_age else newest[0]
        if load is not None:
            fault = ""
        elif self.fault:
            fault = self.fault
        elif age is None:
            fault = f"nothing has arrived from {self.source.endpoint} yet"
        else:
            fault = f"the newest load from {self.source.endpoint} is {age:.0f} s old"
        return LoadReading(load, age, self.received, self.rejected, fault, self.silence)
