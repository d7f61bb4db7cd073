"""The load of an engine as its HTTP server reports it: the Prometheus metrics of vLLM and SGLang, and vLLM's `/load`.

vLLM publishes no load. Its server has `/metrics` unless it was started with `--disable-log-stats`
(`vllm/v1/metrics/loggers.py`); each series has the data-parallel rank in the label `engine`. The names are the same in all
releases from 0.11 to 0.33; those of 0.11 and earlier also have the older `vllm:gpu_cache_usage_perc`. `/load` returns
`{"server_load": n}`: the requests that this server process has (`vllm/entrypoints/serve/instrumentator/basic.py`). It stays 0
without `--enable-server-load-tracking`. SGLang's server has `/metrics` with `--enable-metrics`
(`sglang/srt/observability/metrics_collector.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvevents.errors import ConfigError, ExternalError, MissingDependencyError
from kvevents.wire.load import EngineLoad

MAX_METRICS_BYTES: Final = 4 << 20
"""Largest answer that is read. A vLLM server with two ranks has 80 kB."""
MAX_SERIES: Final = 4_096
"""Most series of load in one answer: some for each rank."""
MAX_COUNT: Final = 1 << 53
"""Largest value of a metric that is a count: above, a double is not exact."""
METRICS_PATH: Final = "/metrics"


class LoadError(ExternalError):
    """An answer from which no load can be read. The message says what is wrong with it, as the end of a sentence."""


class _Names(NamedTuple):
    """The metrics of one kind of engine."""

    running: str
    waiting: str
    rank: str
    """Label with the data-parallel rank."""
    usage: tuple[str, ...]
    """Share of the KV cache in use, 0 to 1; the first that is present counts."""
    used: str | None = None
    """Tokens in use."""
    capacity: str | None = None
    """Capacity in tokens."""
    cache_info: str | None = None
    """A metric whose labels `num_gpu_blocks` and `block_size` are the capacity."""


_VLLM: Final = _Names(
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "engine",
    ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    cache_info="vllm:cache_config_info",
)
_SGLANG: Final = _Names(
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "dp_rank",
    ("sglang:token_usage",),
    used="sglang:num_used_tokens",
    capacity="sglang:max_total_num_tokens",
)
_ENGINES: Final = (_VLLM, _SGLANG)


def _all_names(names: _Names) -> Iterable[str]:
    optional = (names.used, names.capacity, names.cache_info)
    return (names.running, names.waiting, *names.usage, *(name for name in optional if name is not None))


_LINES: Final = re.compile(
    rb"^(?:%b)[ \t{].*$" % b"|".join(re.escape(name.encode()) for names in _ENGINES for name in _all_names(names)), re.MULTILINE
)
"""The lines of these metrics. All others of an answer, which are more than nine tenths, are not parsed."""


class _Series(NamedTuple):
    labels: Mapping[str, str]
    value: float


class _ServerLoad(msgspec.Struct):
    server_load: int


class ReportedLoad:
    """The load of the ranks in one answer of an engine's HTTP server."""

    def __init__(self, series: Mapping[str, list[_Series]], server_load: int | None = None) -> None:
        self._series: Final = series
        self._server_load: Final = server_load

    @classmethod
    def read(cls, body: bytes) -> ReportedLoad:
        """Read the body of `/metrics` or `/load`.

        Raises `LoadError`, and `MissingDependencyError` without prometheus_client.
        """
        if body.lstrip()[:1] == b"{":
            return cls({}, _server_load(body))
        lines = _LINES.findall(body)
        if len(lines) > MAX_SERIES:
            raise LoadError(f"has more than {MAX_SERIES} series of load")
        series: dict[str, list[_Series]] = {}
        for name, labels, value in _parsed(b"\n".join(lines)):
            series.setdefault(name, []).append(_Series(labels, value))
        return cls(series)

    def of_rank(self, rank: int) -> EngineLoad:
        """Return the load of a data-parallel rank; of the only one, whatever its number. Raises `LoadError`."""
        if self._server_load is not None:
            return EngineLoad(running=self._server_load, waiting=0, used_tokens=0, max_tokens=0)
        for names in _ENGINES:
            if names.running in self._series or names.waiting in self._series:
                return self._load(names, rank)
        raise LoadError(f"has no {_VLLM.running} and no {_SGLANG.running}")

    def _load(self, names: _Names, rank: int) -> EngineLoad:
        running, waiting = self._value(names, names.running, rank), self._value(names, names.waiting, rank)
        if running is None or waiting is None:
            missing = names.running if running is None else names.waiting
            raise LoadError(f"has no {missing} of rank {rank}")
        capacity = self._capacity(names, rank)
        used = None if names.used is None else self._value(names, names.used, rank)
        usage = next((found for name in names.usage if (found := self._value(names, name, rank)) is not None), 0.0)
        return EngineLoad(
            running=_count(running),
            waiting=_count(waiting),
            used_tokens=_count(usage * capacity if used is None else used),
            max_tokens=_count(capacity),
            rank=rank,
        )

    def _capacity(self, names: _Names, rank: int) -> float:
        if names.capacity is not None:
            return self._value(names, names.capacity, rank) or 0.0
        for one in self._of(names, names.cache_info or "", rank):
            blocks, size = one.labels.get("num_gpu_blocks", ""), one.labels.get("block_size", "")
            if _is_number(blocks) and _is_number(size):
                return float(blocks) * float(size)
        return 0.0

    def _value(self, names: _Names, name: str, rank: int) -> float | None:
        """Return the value of a rank; the largest if there are several series of it."""
        return max((one.value for one in self._of(names, name, rank)), default=None)

    def _of(self, names: _Names, name: str, rank: int) -> list[_Series]:
        ranks = {one.labels.get(names.rank) for one in self._series.get(names.running, ())}
        wanted = ranks if len(ranks) == 1 else {str(rank)}
        return [one for one in self._series.get(name, ()) if one.labels.get(names.rank) in wanted]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 16


def _count(value: float) -> int:
    if not 0 <= value <= MAX_COUNT:
        raise LoadError(f"has the number {value:g} where a count is expected")
    return round(value)


def _parsed(text: bytes) -> Iterable[tuple[str, Mapping[str, str], float]]:
    require_parser()
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - an extra

    try:
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                if not math.isfinite(sample.value):
                    raise LoadError(f"has {sample.name} {sample.value}")
                yield sample.name, sample.labels, sample.value
    except (ValueError, KeyError, IndexError) as error:  # the parser has no error type of its own
        raise LoadError(f"is not in the text format of Prometheus: {error}") from error


def require_parser() -> None:
    """Raise `MissingDependencyError` if the parser of metrics is not installed."""
    try:
        import prometheus_client  # noqa: F401, PLC0415 - an extra
    except ImportError as error:
        raise MissingDependencyError("the load of vLLM needs prometheus_client: pip install 'kvevents[service]'") from error


def _server_load(body: bytes) -> int:
    try:
        found = msgspec.json.decode(body, type=_ServerLoad).server_load
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LoadError(f"is no answer of vLLM's /load: {error}") from error
    return _count(found)


def is_load_url(text: str) -> bool:
    """Whether a setting `load` is the URL of an HTTP server rather than the endpoint of a socket."""
    return text.startswith(("http://", "https://"))


def check_load_url(text: str) -> str:
    """Return the URL to poll: `/metrics` if it has no path. Raises `ConfigError` for another form."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"invalid load {text!r}: {error}") from error
    is_plain = text.isascii() and text.isprintable() and " " not in text and port != 0
    if not is_plain or not parts.hostname or parts.username is not None or parts.fragment or not is_load_url(text):
        raise ConfigError(f"invalid load {text!r}: expected http://HOST:PORT or https://HOST:PORT, optionally with a path")
    return parts._replace(path=METRICS_PATH).geturl() if parts.path in {"", "/"} else text
