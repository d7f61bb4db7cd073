"""The common part of the plugins: their settings, and the entry of an engine's registry that they replace.

The environment variable `KVEVENTS_PUBLISHER` turns the plugin on and contains its settings. Without the variable, kvevents
changes nothing in an engine. The engine's own options set endpoints and buffers; engines reject or drop unknown options.

The publisher (`engine_publisher`) sends the digest of the engine's own prefix cache in heartbeats. `kvevents.events` defines
the digest. A plugin updates the digest with the cache: it adds the term of each block that enters and subtracts the term of
each block that leaves. So reading the digest costs nothing. Consumers compare the digest with their own blocks.

If keys are configured, nothing is published unencrypted: if the settings cannot be used or the publisher of kvevents cannot be
created, the engine gets its null publisher, because the engine's own event publisher cannot encrypt.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvevents.config import parse_object
from kvevents.engines.engine_publisher import EnginePublisher, OwnPublisher
from kvevents.errors import ConfigError
from kvevents.native_module import find_native
from kvevents.package_metadata import VERSION
from kvevents.publisher.settings import DEFAULT_PUBLISHER_SETTINGS, PublisherSettings
from kvevents.settings import Positive, Seconds, Settings, convert, read_toml
from kvevents.zeromq.keys import Curve

VARIABLE: Final = "KVEVENTS_PUBLISHER"
_ON_VALUES: Final = frozenset({"on", "1", "true", "yes"})
_OFF_VALUES: Final = frozenset({"", "off", "0", "false", "no"})


class EngineSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a plugin inside an engine."""

    heartbeat: Seconds | None = 5.0
    """Time between batches that carry the publisher's digest and the attestation. If None, neither is sent."""
    compact: bool = True
    """Whether consumers that join late get all resident blocks, of any age. Full history requires a replay endpoint."""
    attestation: bool = True
    """Whether heartbeats carry a digest of the engine's own cache, which consumers compare with their state."""
    curve: Curve | None = None
    """CURVE keys of the publisher's sockets."""
    max_failures: Positive = 3
    """Number of consecutive failures to encode or to send after which the engine's own publisher takes over. If `curve` is set,
    the engine's publisher never takes over, because it has no keys."""
    limits: PublisherSettings = DEFAULT_PUBLISHER_SETTINGS
    """Limits and timers of the publisher."""

    def publisher_options(self) -> dict[str, Any]:
        """Return the options of a publisher's constructor."""
        compact = None if self.compact else False
        return {"compact": compact, "heartbeat": self.heartbeat, "curve": self.curve, "settings": self.limits}


def read_settings(environ: Mapping[str, str]) -> EngineSettings | None:
    """Return the settings in `KVEVENTS_PUBLISHER`. Return None if the variable is empty, `off` or `0`.

    Other values of the variable are `on` or `1` for the defaults, a JSON object, or the path of a TOML file.

    Raises `ConfigError`, which names the field, for an unknown field, and for a value of another type or out of range.
    """
    text = environ.get(VARIABLE, "").strip()
    if text.lower() in _OFF_VALUES:
        return None
    if text.lower() in _ON_VALUES:
        return EngineSettings()
    return convert(parse_object(text, VARIABLE) if text.startswith("{") else read_toml(Path(text)), EngineSettings, VARIABLE)


def may_configure_keys(environ: Mapping[str, str]) -> bool:
    """Return whether the settings, valid or not, might configure keys. An unreadable file of settings counts as True."""
    text = environ.get(VARIABLE, "").strip()
    if not text.startswith("{") and text.lower() not in _ON_VALUES | _OFF_VALUES:
        try:
            text = Path(text).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return True
    return re.search("curv|key|secret", text, re.IGNORECASE) is not None


# --- the entry of the registry

PUBLISHER_NAME: Final = "zmq"


CreatePublisher: TypeAlias = Callable[[EngineSettings, int, dict[str, Any], OwnPublisher | None], EnginePublisher]
"""Creates the publisher of kvevents for one rank, with the options of the engine's own constructor. If the publisher of
kvevents fails later, the engine's own publisher continues the stream. The function may raise any exception."""


class PublisherConstructor:
    """Creates a publisher of kvevents or, if that fails, the engine's own publisher (with keys, the null publisher)."""

    def __init__(
        self,
        engine: str,
        rank_option: str,
        settings: EngineSettings | None,
        create: CreatePublisher,
        module: Any,
        fault: Exception | None = None,
    ) -> None:
        """Create the entry. `engine` is the name in log messages; `rank_option` is the name of the parameter for the rank.

        `fault` is the error in settings that configure keys, or None if the settings are valid.
        """
        self._engine = engine
        self._rank_option = rank_option
        self._settings = settings or EngineSettings()
        self._create = create
        self._fault = fault
        self._has_keys = fault is not None or self._settings.curve is not None
        self._module, self._original, self._batch_type = module, module.ZmqEventPublisher, module.KVEventBatch

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        publisher_options = dict(options)
        if arguments:
            publisher_options[self._rank_option], *_ = arguments
        rank = publisher_options.pop(self._rank_option, 0)
        fallback = None
        if not self._has_keys:
            fallback = OwnPublisher(
                self._engine,
                publisher_options,
                create=lambda **changes: self._original(*arguments, **{**options, **changes}),
                empty_batch=lambda: self._batch_type(ts=time.time(), events=[]),
            )
        fault = self._fault
        try:
            show_in_engine_log(self._engine)
            if fault is None:
                return self._create(self._settings, rank, publisher_options, fallback)
        except Exception as error:  # noqa: BLE001 - if anything fails, the engine starts with a publisher of its own
            fault = error
        log_unused_publisher(self._engine, fault, has_keys=self._has_keys)
        return self._module.NullEventPublisher(rank) if self._has_keys else self._original(*arguments, **options)


def replace_publisher(
    engine: str, rank_option: str, module_name: str, create: CreatePublisher, environ: Mapping[str, str], own_name: str = ""
) -> None:
    """Replace the entry `zmq` of the engine's `EventPublisherFactory` if the plugin is turned on.

    The publisher is always registered under `own_name`, unless `own_name` is empty. The engine's options can select `own_name`.

    Exceptions, for example from wrong settings or an unknown release of the engine, are logged. An exception is raised only if
    keys are configured and the engine would otherwise publish unencrypted.
    """
    settings, fault = None, None
    try:
        settings = read_settings(environ)
    except ConfigError as error:
        if not may_configure_keys(environ):
            log_unused_publisher(engine, error)
            return
        fault = error
    is_requested = settings is not None or fault is not None
    if not is_requested and not own_name:
        return
    has_keys = fault is not None or (settings is not None and settings.curve is not None)
    try:
        module = importlib.import_module(module_name)
        registry = module.EventPublisherFactory._registry  # noqa: SLF001 - the engines have no other way to replace a publisher
        current = registry[PUBLISHER_NAME]
        if isinstance(current, PublisherConstructor):
            return
        if is_requested and current is not module.ZmqEventPublisher:
            name = f"{getattr(current, '__module__', '?')}.{getattr(current, '__qualname__', current)}"
            fault = ConfigError(
                f"{name} has replaced the publisher 'zmq' already; uninstall one of the two, or list the other as the engine's "
                "only plugin"
            )
            if not has_keys:
                log_unused_publisher(engine, fault)
                return
        entry = PublisherConstructor(engine, rank_option, settings, create, module, fault)
        if own_name and own_name not in registry:
            registry[own_name] = entry
        if is_requested:
            registry[PUBLISHER_NAME] = entry
    except Exception as error:
        if has_keys:
            raise
        if is_requested:
            log_unused_publisher(engine, error)


def log_unused_publisher(engine: str, error: BaseException, *, has_keys: bool = False) -> None:
    """Log that the engine does not use kvevents, which publisher it uses instead, and why."""
    place = f"{engine} publishes KV cache events itself"
    if has_keys:
        place = "no KV cache events are published, since the settings ask for keys"
    engine_logger(engine).warning("kvevents is not used: %s: %s: %s", place, type(error).__name__, error)


def attach_publisher(
    engine: str,
    publisher: EnginePublisher,
    rank: int,
    settings: EngineSettings,
    ignored_options: Collection[str],
    install_hooks: Callable[[], bool],
) -> None:
    """Install the hooks of a new publisher, and log its features.

    `install_hooks` returns whether the engine's cache can be attested; `ignored_options` are the engine's options that the
    publisher does not support.
    """
    with publisher.ending_attestation():
        publisher.expects_attestation = install_hooks() and settings.attestation
    features = ["no heartbeats"] if settings.heartbeat is None else [f"heartbeats every {settings.heartbeat:g} s"]
    features += ["attestation"] if publisher.expects_attestation and settings.heartbeat is not None else []
    features += ["full history"] if publisher.stats().history is not None else []
    features += ["no digests: kvevents[native] adds them and full history"] if find_native() is None else []
    engine_logger(engine).info(
        "kvevents %s publishes KV cache events of rank %d at %s: %s%s",
        VERSION,
        rank,
        publisher.endpoint,
        ", ".join(features),
        f"; it ignores the options {', '.join(sorted(ignored_options))}" if ignored_options else "",
    )


_HOOKS_ATTRIBUTE: Final = "_kvevents_hooked"
"""Name of the class attribute that has the names of the hooked methods, so that no method gets two hooks."""


def hook(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method of an engine's class by `wrap(method)`; do nothing if the method already has a hook."""
    hooks: set[str] = owner.__dict__.get(_HOOKS_ATTRIBUTE, set())
    if name not in hooks:
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(wrap(original)))
        setattr(owner, _HOOKS_ATTRIBUTE, hooks | {name})


class _EngineLogHandler(logging.Handler):
    """Passes log records of kvevents to a logger of the engine, whose handlers write the records."""

    def __init__(self, target: logging.Logger) -> None:
        super().__init__()
        self._target = target

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._target.handle(record)
        except Exception:  # noqa: BLE001 - a log that cannot be written must not stop the publisher
            self.handleError(record)


def show_in_engine_log(engine: str) -> None:
    """Write messages of the publisher, for example about a full queue, to the log of the engine.

    vLLM configures only its own logger, so messages of other loggers would be lost, or written without a time. Do nothing if
    the process already has handlers for messages of kvevents.
    """
    logger, target = logging.getLogger("kvevents"), engine_logger(engine)
    if logger.hasHandlers():
        return
    logger.addHandler(_EngineLogHandler(target))
    if logger.level == logging.NOTSET:
        logger.setLevel(target.getEffectiveLevel())


def engine_logger(engine: str) -> logging.Logger:
    """Return a child of the engine's logger. Messages of this logger appear in the engine's log."""
    return logging.getLogger(f"{engine.lower()}.kvevents")
