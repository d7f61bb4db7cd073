"""A relay beside an engine: its stream with full history, for any number of consumers, across its own restarts."""

from kvevents.relay.relay import Relay
from kvevents.relay.settings import RelaySettings
from kvevents.relay.status import RelayStatus

__all__ = ["Relay", "RelaySettings", "RelayStatus"]
