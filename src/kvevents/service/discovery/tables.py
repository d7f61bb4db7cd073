"""What people write about an engine: a `[[sources]]` table, or what all engines of one name have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final

from kvevents.config import Curve
from kvevents.endpoints import offset_endpoint_port, port_collision, split_tcp
from kvevents.errors import ConfigError
from kvevents.service.discovery.places import Place, at_host, check_endpoint
from kvevents.service.discovery.urls import BaseUrl
from kvevents.service.registration import DEFAULT_GROUP, Registration
from kvevents.settings import Range, Settings, convert
from kvevents.structs import prepared

MAX_RANKS: Final = 1_024
"""Data-parallel ranks of one engine, whoever claims them; the largest known deployments have a few hundred."""


class Template(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is said of an engine beside where it is; all addresses of one DNS name share one."""

    model: str | None = None
    """Needed where the engine is not asked for it."""
    ranks: Annotated[int, Range(1, MAX_RANKS)] = 1
    """Data-parallel ranks: ports count up from the first one's. An engine that is asked must have at least these."""
    rank: Annotated[int, Range()] = 0
    """Of the first one."""
    replay_endpoint: str | None = None
    """A wildcard host, as in `tcp://*:5558`, stands for the engine's own."""
    block_size: int | None = None
    tenant: str = DEFAULT_GROUP
    group: str = DEFAULT_GROUP
    topic: str = ""
    bind: bool = False
    curve: Curve | None = None
    lora_name: str | None = None
    salt: str | None = None

    def registrations(self, instance: str, endpoint: str) -> tuple[Registration, ...]:
        """All ranks of an engine whose first one publishes at `endpoint`. Raises `ConfigError` that names the field."""
        if self.model is None:
            raise ConfigError("model is missing; routers ask for a model's engines")
        collision = port_collision(endpoint, self.replay_endpoint, self.ranks - 1)
        if collision is not None:
            raise ConfigError(collision)
        return tuple(self.registration(instance, self.model, place) for place in self._places(endpoint))

    def registration(self, instance: str, model: str, place: Place) -> Registration:
        """One rank, at a place that somebody told; what this template says goes before what the place says."""
        replay = place.replay_endpoint
        check_endpoint("endpoint", place.endpoint, bind=self.bind)
        if replay is not None:
            check_endpoint("replay_endpoint", replay)
        return Registration(
            instance=instance,
            endpoint=place.endpoint,
            model=model,
            rank=place.rank,
            replay_endpoint=replay,
            topic=self.topic or place.topic,
            block_size=place.block_size if self.block_size is None else self.block_size,
            tenant=self.tenant,
            group=self.group,
            lora_name=self.lora_name,
            salt=self.salt,
            bind=self.bind,
            curve=self.curve,
        )

    def replay_of(self, index: int, endpoint: str) -> str | None:
        """Where the rank that comes `index` after the first answers replay requests, given where it publishes."""
        replay = offset_endpoint_port(self.replay_endpoint, index)
        found = split_tcp(endpoint)
        return replay if replay is None or found is None else at_host(replay, found[0])

    def _places(self, endpoint: str) -> Iterator[Place]:
        for index in range(self.ranks):
            its = offset_endpoint_port(endpoint, index) or endpoint
            yield Place(self.rank + index, its, self.replay_of(index, its))


ANY: Final = Template()
"""Nothing is said beside where it is."""


@prepared
class SourceTable(Template, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: its endpoint, or the URL of its HTTP server, where it tells its endpoints itself.

    Raises `ConfigError` when it has both or neither, or a field cannot be used.
    """

    instance: str | None = None
    """Its name for routers; its address when not given."""
    endpoint: str | None = None
    """Where its first rank publishes: `tcp://HOST:PORT`."""
    base_url: str | None = None
    """Such as `http://HOST:PORT`: vLLM has `/kv_event_sources` there, SGLang `/server_info`."""

    def __post_init__(self) -> None:
        Template.__post_init__(self)
        if (self.endpoint is None) == (self.base_url is None):
            raise ConfigError("it needs either endpoint or base_url" + (", not both" if self.endpoint else ""))
        if self.base_url is not None:
            BaseUrl.parse(self.base_url)
        self.listed()

    def listed(self) -> tuple[Registration, ...]:
        """Its ranks as far as the table names them: those of an engine that is to be asked are not among them."""
        if self.endpoint is None:
            return ()
        return self.registrations(self.instance or self.endpoint.removeprefix("tcp://"), self.endpoint)


def to_table(number: int, fields: Any) -> SourceTable:
    """A parsed table, the `number`th of its kind. Raises `ConfigError` that names the table and the field."""
    name = fields.get("instance") if isinstance(fields, dict) else None
    label = f"[[sources]] {number}" + (f" ({name})" if isinstance(name, str) and name else "")
    return convert(fields, SourceTable, label)
