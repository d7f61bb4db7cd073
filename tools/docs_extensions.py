"""The page of extension points: the classes and functions of users that kvevents calls, with their docstrings."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, Final, NamedTuple


class ExtensionPoint(NamedTuple):
    """A class that users derive from or imitate, and where an object of theirs is given."""

    module: str
    name: str
    given: str

    @property
    def path(self) -> str:
        """The dotted name of the class."""
        return f"{self.module}.{self.name}"


PUBLIC: Final = (
    ExtensionPoint("kvevents.routing", "Policy", "`Router(policy)`, `simulate(..., chosen=)`"),
    ExtensionPoint("kvevents.subscriber", "Sink", "`Subscriber(sink=)`, `AsyncSubscriber(sink=)`"),
    ExtensionPoint("kvevents.subscriber", "Outcome", "what `Sink.apply_many` returns"),
    ExtensionPoint("kvevents.subscriber", "Transport", "`Subscriber(transport=)`; `kvevents.testing.FakeTransport` is one"),
    ExtensionPoint("kvevents.subscriber", "Connection", "what `Transport.open` returns"),
    ExtensionPoint("kvevents.publisher", "EventPublisher", "`EventPublisherFactory.register_publisher(name, constructor)`"),
    ExtensionPoint("kvevents.events", "KVConnectorKVEvents", "a KV connector of vLLM"),
)
"""Extension points that stay the same as docs/stability.md says."""

INTERNAL: Final = (
    ExtensionPoint("kvevents.service.discovery.provider", "Provider", "a table of `service/settings.py` and of `runner.py`"),
    ExtensionPoint("kvevents.service.index_source", "IndexSource", "`kvevents.service.process.serve(open_source=)`"),
    ExtensionPoint("kvevents.conform.target", "Driver", "`DRIVERS` of `cli/conform.py`"),
    ExtensionPoint("kvevents.conform.target", "Target", "what `Driver.target` yields"),
)
"""Extension points inside kvevents, which can change in any release."""

SHOWN_ELSEWHERE: Final = frozenset({"kvevents.publisher.EventPublisher", "kvevents.events.KVConnectorKVEvents"})
"""Extension points that users also call, so that the pages of their modules have them."""


def moved_from(module: str) -> list[str]:
    """Return the names that the page of a module leaves to the page of extension points."""
    return [point.name for point in PUBLIC if point.module == module and point.path not in SHOWN_ELSEWHERE]


def extension_points() -> str:
    """Return a table of the public extension points, and their docstrings."""
    return _table(PUBLIC) + _docstrings(PUBLIC)


def internal_extension_points() -> str:
    """Return a table of the extension points inside kvevents, and their docstrings."""
    return _table(INTERNAL) + _docstrings(INTERNAL)


def _table(points: tuple[ExtensionPoint, ...]) -> str:
    rows = (f"| {_link(point)} | {_summary(point)} | {point.given} |" for point in points)
    return "\n".join(["| class | what it is | where it is given |", "|---|---|---|", *rows]) + "\n"


def _link(point: ExtensionPoint) -> str:
    page = f"api/{point.module}.md" if point.path in SHOWN_ELSEWHERE else ""
    return f"[`{point.name}`]({page}#{point.path})"


def _summary(point: ExtensionPoint) -> str:
    found: Any = getattr(import_module(point.module), point.name)
    return (inspect.getdoc(found) or "").partition("\n")[0]


def _docstrings(points: tuple[ExtensionPoint, ...]) -> str:
    return "".join(f"\n::: {point.path}\n" for point in points if point.path not in SHOWN_ELSEWHERE)
