"""A relay beside an engine: the engine's stream with full history, for any number of consumers, across restarts."""

from kvevents.relay.relay import Relay
from kvevents.relay.settings import RelayLimits, RelaySettings
from kvevents.relay.status import RelayStatus

__all__ = ["Relay", "RelayLimits", "RelaySettings", "RelayStatus"]
