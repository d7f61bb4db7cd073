"""What plugins share: their settings, the entry of an engine's registry that they replace, and the publisher inside an engine.

The settings are in the environment variable `KVEVENTS_PUBLISHER`. The engines' own options name endpoints and buffers. They
reject or drop options that they do not know, so ours have a variable.

The publisher (`engine_publisher`) sends the digest of the engine's own prefix cache in heartbeats. `kvevents.events`
has the digest. A plugin keeps it beside the engine's cache: a block that enters adds its term and a block that leaves subtracts
it, so reading it costs nothing. Consumers compare it with the blocks they hold.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from kvevents.engines.engine_publisher import EnginePublisher, OwnPublisher
from kvevents.errors import ConfigError
from kvevents.native_module import find_native
from kvevents.package_metadata import version
from kvevents.publisher import ZmqEventPublisher
from kvevents.publisher.settings import DEFAULT_PUBLISHER_SETTINGS, PublisherSettings
from kvevents.settings import Positive, Range, Seconds, Settings, convert, read_toml, suggestion
from kvevents.zeromq.keys import Curve

VARIABLE: Final = "KVEVENTS_PUBLISHER"
_POSITIVE: Final = Range(is_open=True)


class EngineSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plugin does inside an engine."""

    enabled: bool = True
    """Whether the publisher of kvevents replaces the engine's."""
    heartbeat: Seconds | None = 5.0
    """Time between batches that carry the publisher's digest and the attestation. None sends neither."""
    compact: bool = True
    """Whether consumers that join late get all resident blocks, however old. Needs a replay endpoint."""
    attestation: bool = True
    """Whether heartbeats carry a digest of the engine's own cache, which consumers compare with their state."""
    curve: Curve | None = None
    """CURVE keys of the publisher's sockets."""
    max_failures: Positive = 3
    """Failures to encode or to send in sequence after which the engine's own publisher takes over. It has no keys, so with
    `curve` it never does."""
    limits: PublisherSettings = DEFAULT_PUBLISHER_SETTINGS
    """Limits and timers of the publisher."""


def read_settings(environ: Mapping[str, str]) -> EngineSettings:
    """Return the settings in `KVEVENTS_PUBLISHER`: a JSON object, or the path of a TOML file. Without it, the defaults.

    Raises `ConfigError`, which names the field, for other text, an unknown field, and a value of another type or range.
    """
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return EngineSettings()
    found = _parse_json(text) if text.startswith("{") else read_toml(Path(text))
    _reject_unknown_limits(found.get("limits"), PublisherSettings, "limits")
    settings = convert(found, EngineSettings, VARIABLE)
    _check_limits(settings.limits, "limits")
    return settings


def _parse_json(text: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = msgspec.json.decode(text, type=dict)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{VARIABLE} is not a JSON object: {error}") from error
    return found


def _check_limits(limits: Any, place: str) -> None:
    """Raise `ConfigError` for a limit that is not above 0: a publisher with it would send nothing, or never wait."""
    for field in dataclasses.fields(limits):
        value, name = getattr(limits, field.name), f"{place}.{field.name}"
        if dataclasses.is_dataclass(value):
            _check_limits(value, name)
        elif not all(_POSITIVE.holds(each) for each in (value if isinstance(value, tuple) else (value,))):
            raise ConfigError(f"{VARIABLE}: {name} is {value}; it must be {_POSITIVE}")


def _reject_unknown_limits(found: Any, kind: Any, place: str) -> None:
    """Raise `ConfigError` for a field that `kind`, a dataclass, does not have: msgspec would ignore it."""
    if not isinstance(found, dict):
        return
    known = {field.name: getattr(field.default, "__class__", None) for field in dataclasses.fields(kind)}
    for name, value in found.items():
        if name not in known:
            raise ConfigError(
                f"{VARIABLE}: {place}: unknown field {name!r}{suggestion(name, known)} known fields: {', '.join(known)}"
            )
        if dataclasses.is_dataclass(known[name]):
            _reject_unknown_limits(value, known[name], f"{place}.{name}")


# --- the entry of the registry

PUBLISHER_NAME: Final = "zmq"


class CreatePublisher(Protocol):
    """Creates the publisher of kvevents for one rank."""

    def __call__(
        self, settings: EngineSettings, rank: int, options: dict[str, Any], own: OwnPublisher | None
    ) -> EnginePublisher:
        """Return the publisher. If it fails later, the engine's own publisher (`own`) continues the stream. May raise anything.

        `options` are those of the engine's own constructor.
        """
        ...


class PublisherConstructor:
    """The replaced entry. It returns a publisher of kvevents, or the engine's own if that fails."""

    def __init__(
        self,
        engine: str,
        rank_option: str,
        settings: EngineSettings,
        create: CreatePublisher,
        original: Callable[..., Any],
        batch_type: Any,
    ) -> None:
        """`engine` names the engine in log messages; `rank_option` is the parameter that has the rank."""
        self._engine = engine
        self._rank_option = rank_option
        self._batch_type = batch_type
        self._settings = settings
        self._create = create
        self._original = original

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        given = dict(options)
        if arguments:
            given[self._rank_option], *_ = arguments
        rank = given.pop(self._rank_option, 0)
        own = self._own_publisher(given, arguments, options) if self._settings.curve is None else None
        try:
            show_in_engine_log(self._engine)
            return self._create(self._settings, rank, given, own)
        except Exception as error:  # noqa: BLE001 - if anything fails, the engine starts with its own publisher
            log_unused(self._engine, error)
        return self._original(*arguments, **options)

    def _own_publisher(self, given: dict[str, Any], arguments: Sequence[Any], options: dict[str, Any]) -> OwnPublisher:
        return OwnPublisher(
            self._engine,
            given,
            create=lambda **changed: self._original(*arguments, **{**options, **changed}),
            empty_batch=lambda: self._batch_type(ts=time.time(), events=[]),
        )


def replace_publisher(
    engine: str, rank_option: str, module: Any, create: CreatePublisher, environ: Mapping[str, str]
) -> PublisherConstructor | None:
    """Replace the entry `zmq` of `module.EventPublisherFactory`. Return the new entry.

    Return None if the settings disable the plugin, or if another package has replaced the entry, which is logged. Raises
    `ConfigError` for wrong settings, and any exception that an unknown release of the engine causes.
    """
    settings = read_settings(environ)
    if not settings.enabled:
        return None
    registry = module.EventPublisherFactory._registry  # noqa: SLF001 - the engines have no other way to replace a publisher
    current = registry[PUBLISHER_NAME]
    if isinstance(current, PublisherConstructor):
        return current
    if current is not module.ZmqEventPublisher:
        engine_logger(engine).warning(
            "kvevents is not used: %s has replaced the publisher 'zmq' already; uninstall one of the two, or list the other "
            "as the engine's only plugin",
            f"{getattr(current, '__module__', '?')}.{getattr(current, '__qualname__', current)}",
        )
        return None
    registry[PUBLISHER_NAME] = PublisherConstructor(engine, rank_option, settings, create, current, module.KVEventBatch)
    constructor: PublisherConstructor = registry[PUBLISHER_NAME]
    return constructor


def log_unused(engine: str, error: BaseException) -> None:
    """Log that the engine publishes by itself, and why."""
    engine_logger(engine).warning(
        "kvevents is not used: %s publishes KV cache events itself: %s: %s", engine, type(error).__name__, error
    )


def log_publisher(
    engine: str, publisher: ZmqEventPublisher, rank: int, settings: EngineSettings, *, attests: bool, ignored: list[str]
) -> None:
    """Log what a new publisher does, and the options of the engine that it does not know."""
    features = ["no heartbeats"] if settings.heartbeat is None else [f"heartbeats every {settings.heartbeat:g} s"]
    features += ["attestation"] if attests and settings.heartbeat is not None else []
    features += ["full history"] if publisher.stats().history is not None else []
    features += ["no digests: pip install 'kvevents[native]' adds them and full history"] if find_native() is None else []
    engine_logger(engine).info(
        "kvevents %s publishes KV cache events of rank %d at %s: %s%s",
        version(),
        rank,
        publisher.endpoint,
        ", ".join(features),
        f"; it ignores the options {', '.join(ignored)}" if ignored else "",
    )


class _EngineLogHandler(logging.Handler):
    """Passes records of the loggers of kvevents to a logger of the engine, whose handlers write them."""

    def __init__(self, target: logging.Logger) -> None:
        super().__init__()
        self._target = target

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._target.handle(record)
        except Exception:  # noqa: BLE001 - a log that cannot be written must not stop the publisher
            self.handleError(record)


def show_in_engine_log(engine: str) -> None:
    """Write what the publisher logs, such as that its queue is full, to the log of the engine.

    vLLM configures only its own logger, so lines of other loggers would be lost, or have no time. Does nothing if the process
    has handlers for them already.
    """
    own, target = logging.getLogger("kvevents"), engine_logger(engine)
    if own.hasHandlers():
        return
    own.addHandler(_EngineLogHandler(target))
    if own.level == logging.NOTSET:
        own.setLevel(target.getEffectiveLevel())


def engine_logger(engine: str) -> logging.Logger:
    """Return a child of the engine's logger, so that the lines appear in its log."""
    return logging.getLogger(f"{engine.lower()}.kvevents")
