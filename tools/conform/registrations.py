"""Scenarios of wrong registrations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tools.conform.script import A, B, Play, Script

FOREIGN_BATCHES: Final = 300
"""More batches than kvevents compares with live ones without asking for them again."""


def _no_block_size(script: Script) -> None:
    wrong, right = script.engine("wrong"), script.engine("right")
    script.follow(wrong, block_size=0)
    script.ask(A)
    script.follow(right)
    right.store(A)
    script.check()


def _unfollowable(address: str) -> Play:
    def play(script: Script) -> None:
        script.follow(script.engine(address=address))
        script.check(4.0, reports=["a"])

    return play


def _foreign_replay(play_on: bool) -> Play:
    """The replay endpoint is that of another engine, which has published more."""

    def play(script: Script) -> None:
        other = script.engine("b", seed=2)
        engine = script.engine(replay_of="b")
        other.store(B, lost=True)
        other.publish_json([1.0, [], 0], lost=True, times=FOREIGN_BATCHES)
        script.follow(engine)
        script.pause(2.0)
        if play_on:
            engine.store(A)
        held = {"a": engine.holds(A)}
        script.check(queries=[A.query(held), B.query({})])

    return play


def registrations() -> Iterator[tuple[Script, Play]]:
    for name, title, play in (
        ("no-block-size", "a registration with block_size 0, then a right one", _no_block_size),
        ("unreachable", "an endpoint where nothing listens", _unfollowable("unreachable")),
        ("unresolvable", "a name that does not resolve", _unfollowable("unresolvable")),
        ("silent-port", "a port that accepts connections and sends nothing", _unfollowable("silent")),
        ("foreign-replay", "the replay endpoint of another engine; the registered one is idle", _foreign_replay(False)),
        ("foreign-replay-live", "the replay endpoint of another engine; the registered one goes on", _foreign_replay(True)),
    ):
        needs = {"no-block-size": ["register"], "foreign-replay": [], "foreign-replay-live": []}.get(name, ["reports"])
        yield Script(name, title, "registration", needs=needs), play
