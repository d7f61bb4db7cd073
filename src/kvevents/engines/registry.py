"""The entry of an engine's registry of publishers that a plugin replaces, and what happens when the plugin fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from kvevents.engines.settings import EngineSettings, read_settings
from kvevents.native_module import find_native
from kvevents.publisher import ZmqEventPublisher
from kvevents.version import version

PUBLISHER_NAME: Final = "zmq"


class CreatePublisher(Protocol):
    """Creates the publisher of kvevents for one rank."""

    def __call__(self, settings: EngineSettings, rank: int, options: dict[str, Any]) -> Any:
        """Return the publisher. `options` are those of the engine's own constructor. May raise anything."""
        ...


class PublisherConstructor:
    """The replaced entry. It returns a publisher of kvevents, or the engine's own if that fails."""

    def __init__(
        self, engine: str, rank_option: str, settings: EngineSettings, create: CreatePublisher, original: Callable[..., Any]
    ) -> None:
        """`engine` names the engine in log messages; `rank_option` is the parameter that has the rank."""
        self._engine = engine
        self._rank_option = rank_option
        self._settings = settings
        self._create = create
        self._original = original

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        given = dict(options)
        if arguments:
            given[self._rank_option], *_ = arguments
        rank = given.pop(self._rank_option, 0)
        try:
            return self._create(self._settings, rank, given)
        except Exception as error:  # noqa: BLE001 - whatever fails, the engine starts with its own publisher
            log_unused(self._engine, error)
        return self._original(*arguments, **options)


def replace_publisher(
    engine: str, rank_option: str, module: Any, create: CreatePublisher, environ: Mapping[str, str]
) -> PublisherConstructor | None:
    """Replace the entry `zmq` of `module.EventPublisherFactory`. Return the new entry.

    Return None if the settings disable the plugin, or if another package has replaced the entry, which is logged. Raises
    `ConfigError` for wrong settings, and whatever an unknown release of the engine causes.
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
    registry[PUBLISHER_NAME] = PublisherConstructor(engine, rank_option, settings, create, current)
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
    features = [f"heartbeats every {settings.heartbeat:g} s"]
    features += ["attestation"] if attests else []
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


def engine_logger(engine: str) -> logging.Logger:
    """Return a child of the engine's logger, so that the lines appear in its log."""
    return logging.getLogger(f"{engine.lower()}.kvevents")
