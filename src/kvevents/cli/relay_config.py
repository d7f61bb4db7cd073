"""Settings of `kvevents relay`."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from dataclasses import replace

from kvevents.cli.options import curve_of, engine
from kvevents.errors import ConfigError
from kvevents.relay.settings import RelayOptions, RelaySettings
from kvevents.settings import FilePath, Host, Port, Positive, PublicKey


class RelayConfig(RelayOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A relay as a process."""

    upstreams: tuple[str, ...]
    """Where the engine publishes, and answers replay requests; several become one stream."""
    ranks: Positive = 1
    """Data-parallel ranks of each engine, on ports counted up."""
    topic_prefix: str = ""
    """Receive topics that begin with this only."""
    upstream_curve_key: FilePath | None = None
    """Own CURVE keys towards the engines: a NAME.key_secret of `kvevents keys`."""
    upstream_curve_server_key: PublicKey | None = None
    """Public key of the engines."""
    metrics_port: Port | None = None
    """Port at which Prometheus may scrape (default: nowhere)."""
    metrics_host: Host = "127.0.0.1"
    """Address of that port."""

    def relay(self) -> RelaySettings:
        """The relay of this process. Raises `ConfigError`."""
        keys = curve_of(
            Namespace(curve_key=self.upstream_curve_key, curve_server_key=self.upstream_curve_server_key, curve_allow=None)
        )
        try:
            engines = [replace(engine(each), topic=self.topic_prefix, curve=keys) for each in self.upstreams]
        except ArgumentTypeError as error:
            raise ConfigError(f"upstreams: {error}") from error
        options = {name: getattr(self, name) for name in RelayOptions.__struct_fields__}
        return RelaySettings(upstreams=tuple(source for each in engines for source in each.ranks(self.ranks)), **options)
