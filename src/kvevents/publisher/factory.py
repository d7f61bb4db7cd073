"""Creates publishers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final

from kvevents.config import KVEventsConfig
from kvevents.errors import ConfigError
from kvevents.publisher.base import EventPublisher, NullEventPublisher
from kvevents.publisher.zmq_publisher import ZmqEventPublisher

_ENGINE_FIELDS: Final = ("endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic")
_OWN_FIELDS: Final = ("bind", "dialect", "replay_topic", "compact", "curve", "heartbeat")


class PublisherRegistry:
    """Maps names to constructors. kvevents, its vLLM interface and its SGLang interface have separate registries."""

    _registry: ClassVar[dict[str, Callable[..., EventPublisher]]]

    @classmethod
    def register_publisher(cls, name: str, ctor: Callable[..., EventPublisher]) -> None:
        """Add a publisher. `ctor` gets the rank and the fields of the configuration as keyword arguments.

        Raises KeyError if the name is registered.
        """
        if name in cls._registry:
            raise KeyError(f"publisher '{name}' already registered")
        cls._registry[name] = ctor

    @classmethod
    def check_name(cls, kind: str) -> None:
        """Raise `ConfigError`, a ValueError, unless a publisher of this name is registered."""
        if kind not in cls._registry:
            names = " or ".join(map(repr, sorted(cls._registry)))
            raise ConfigError(f"Unknown event publisher '{kind}': Input should be {names}, or registered beforehand")

    @classmethod
    def _constructor(cls, kind: str) -> Callable[..., EventPublisher]:
        cls.check_name(kind)
        return cls._registry[kind]


class EventPublisherFactory(PublisherRegistry):
    """Creates the publisher that a configuration names."""

    _registry = {"null": NullEventPublisher, "zmq": ZmqEventPublisher}  # noqa: RUF012 - a ClassVar of the base class

    @classmethod
    def create(cls, config: KVEventsConfig | None, data_parallel_rank: int = 0, **options: Any) -> EventPublisher:
        """Return the publisher for one rank; a `NullEventPublisher` if `config` is None or events are not enabled.

        `config` may also be an engine's own. `options`, such as `dialect`, are passed to the publisher's constructor.

        Raises ValueError if the name is not registered, and any exception of the publisher's constructor.
        """
        if config is None or not config.enable_kv_cache_events or config.publisher in {None, "null"}:
            return NullEventPublisher(data_parallel_rank)
        settings = {name: getattr(config, name) for name in _ENGINE_FIELDS}
        # A publisher written for an engine does not know the fields of kvevents, so these are passed only if they are set.
        settings |= {name: value for name in _OWN_FIELDS if (value := getattr(config, name, None)) is not None} | options
        return cls._constructor(config.publisher or "")(data_parallel_rank=data_parallel_rank, **settings)
