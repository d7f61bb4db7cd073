"""Starts engines and services with the models and plugins in a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from tests.system.engines.installation import Environment, build_wheel, unpack_kvevents, write_observer
from tests.system.engines.models import ADAPTERS, Model, write_adapter, write_model
from tests.system.engines.server import Engine, EngineSettings
from tests.system.engines.service import Service

HEARTBEAT_SECONDS: Final = 1.0
"""Interval of the plugin's heartbeats, which carry attestations."""


@dataclass(frozen=True, slots=True)
class Publisher:
    """The publisher that an engine uses."""

    name: str
    has_plugin: bool
    variables: Mapping[str, str]


OWN: Final = Publisher("vLLM's own", has_plugin=False, variables={})
PLUGIN: Final = Publisher(
    "kvevents plugin", has_plugin=True, variables={"KVEVENTS_PUBLISHER": f'{{"heartbeat": {HEARTBEAT_SECONDS}}}'}
)
COMPAT: Final = Publisher("kvevents.compat.vllm", has_plugin=False, variables={"ENGINE_OBSERVER_PUBLISHER": "compat"})


class Pair(NamedTuple):
    """An engine and the service that follows it."""

    engine: Engine
    service: Service


class Stage:
    """Models and plugins in a folder. Starts engines with them, one at a time."""

    def __init__(self, environment: Environment, folder: Path, wheel: Path | None = None) -> None:
        """Write the folders. Without a `wheel` of kvevents, build one from this checkout."""
        self.folder: Final = folder
        self._environment: Final = environment
        self._models: Final[dict[Model, Path]] = {
            "llama": write_model(folder / "llama", "llama"),
            "hybrid": write_model(folder / "hybrid", "hybrid"),
        }
        self._adapters: Final = {name: write_adapter(folder / name, seed) for seed, name in enumerate(ADAPTERS)}
        self._observer: Final = write_observer(folder / "observer")
        self.wheel: Final = wheel or build_wheel(folder / "wheel")
        self._kvevents: Final = unpack_kvevents(self.wheel, folder / "kvevents-without-plugin", with_plugin=False)
        self._plugin: Final = unpack_kvevents(self.wheel, folder / "kvevents-with-plugin")
        self._started = 0

    @contextmanager
    def engine(
        self,
        publisher: Publisher,
        model: Model,
        blocks: int,
        *,
        path: Path | None = None,
        variables: Mapping[str, str] | None = None,
        ranks: int = 1,
    ) -> Iterator[Engine]:
        """Start an engine with `ranks` data-parallel ranks.

        `path` replaces the folder with kvevents. `variables` are added to the environment.
        """
        self._started += 1
        folder = self.folder / f"run-{self._started}"
        folder.mkdir()
        kvevents = path or (self._plugin if publisher.has_plugin else self._kvevents)
        settings = EngineSettings(
            self._environment,
            self._models[model],
            blocks,
            folder,
            (self._observer, kvevents),
            self._adapters if model == "llama" else {},
            dict(publisher.variables) | dict(variables or {}),
            ranks,
        )
        with Engine(settings) as engine:
            engine.start()
            yield engine

    @contextmanager
    def pair(self, publisher: Publisher, model: Model, blocks: int) -> Iterator[Pair]:
        """Start an engine, and a service that gets only its URL."""
        with self.engine(publisher, model, blocks) as engine, Service(engine.url, engine.settings.folder) as service:
            yield Pair(engine, service)
