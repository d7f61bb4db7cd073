"""Publishers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

from kvevents.config import KVEventsConfig
from kvevents.errors import ConfigError
from kvevents.publisher.base import EventPublisher
from kvevents.publisher.null import NullEventPublisher
from kvevents.publisher.zmq import ZmqEventPublisher

_ENGINES_OWN: Final = ("endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic")
_OURS: Final = ("bind", "dialect", "replay_topic", "compact", "curve", "heartbeat", "snapshot_endpoint")


class PublisherRegistry:
    """Constructors by name; the factory of each surface (ours, vLLM's, SGLang's) has one of its own."""

    _registry: ClassVar[dict[str, Callable[..., EventPublisher]]]

    @classmethod
    def register_publisher(cls, name: str, ctor: Callable[..., EventPublisher]) -> None:
        """Add a publisher. `ctor` is called with the rank and the fields of the configuration, by name.

        Raises KeyError when the name is taken.
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
    """Makes the publisher that a configuration asks for."""

    _registry = {"null": NullEventPublisher, "zmq": ZmqEventPublisher}  # noqa: RUF012 - declared in the base class

    @classmethod
    def create(cls, config: KVEventsConfig | None, data_parallel_rank: int = 0) -> EventPublisher:
        """The publisher for one rank; a `NullEventPublisher` without a configuration or when events are not enabled.

        Raises ValueError for a name that is not registered, and whatever the publisher raises.
        """
        if config is None or not config.enable_kv_cache_events or config.publisher in {None, "null"}:
            return NullEventPublisher(data_parallel_rank)
        settings = {name: getattr(config, name) for name in _ENGINES_OWN}
        # Ours only when set: a publisher written for an engine does not know them.
        settings |= {name: getattr(config, name) for name in _OURS if getattr(config, name) is not None}
        return cls._constructor(config.publisher or "")(data_parallel_rank=data_parallel_rank, **settings)
