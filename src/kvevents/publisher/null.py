"""The publisher of an engine whose events are not wanted."""

from __future__ import annotations

from typing import Any

from kvevents.publisher.base import EventPublisher


class NullEventPublisher(EventPublisher):
    """Accepts everything, sends nothing."""

    def publish(self, events: Any) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"
