"""Scenarios of engines and targets that end and come back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvevents.conform import scenario as steps
from tools.conform.script import A, B, C, D, Play, Script


def _restart(**settings: Any) -> Play:
    def play(script: Script) -> None:
        engine = script.warm(A, **settings)
        engine.restart()
        engine.await_subscriber()
        script.ask(B, C)
        engine.store(B)
        # What arrives together with the connection may be of the one before: only a later batch confirms what was replayed.
        script.settle(1.0)
        engine.store(C)
        script.check()

    return play


def _restart_idle(script: Script) -> None:
    engine = script.warm(A)
    engine.restart()
    engine.await_subscriber()
    script.check()


def _restart_ahead(script: Script) -> None:
    engine = script.warm(A)
    engine.restart()
    script.ask(B, C, D)
    engine.store(B, lost=True)
    engine.store(C, lost=True)
    engine.await_subscriber()
    engine.store(D, range(1))
    script.settle(1.0)
    engine.store(D, range(1, D.blocks))
    script.check()


def _restart_same_number(script: Script) -> None:
    """The new life has published exactly as many batches as the old one when the connection is back, and is idle."""
    engine = script.warm(A)
    engine.restart()
    script.ask(B)
    engine.store(B, lost=True)
    engine.await_subscriber()
    script.check()


def _restarts(script: Script) -> None:
    """Three incarnations in a row, each with another prompt."""
    engine = script.warm(A)
    for prompt in (B, C, D):
        engine.restart()
        engine.await_subscriber()
        script.ask(prompt)
        engine.store(prompt, range(2))
        script.settle(1.0)
        engine.store(prompt, range(2, prompt.blocks))
        script.settle(2.0)
    script.check()


def _gone(script: Script) -> None:
    engine = script.warm(A)
    engine.stop()
    script.check()


def _registered_again(script: Script) -> None:
    engine = script.warm(A)
    script.add(steps.Unregister("a"))
    engine.restart()
    script.ask(B)
    engine.store(B, range(5), lost=True)
    script.follow(engine)
    engine.store(B, range(5, 10))
    script.check()


def _killed(*, both: bool = False, play_on: bool = False) -> Play:
    """The target dies while its engine goes on, or is restarted as well; the engine stores less than the target knew."""

    def play(script: Script) -> None:
        engine = script.warm(A, **({} if both else {"buffer_steps": 5}))
        script.ask(B, *([C] if both else []))
        script.add(steps.Kill())
        if both:
            engine.restart()
            engine.store(B)
            engine.store(C)
        else:
            engine.store(B, range(2))
        script.add(steps.Start())
        engine.await_subscriber()
        if play_on:
            script.settle()
            engine.heartbeat()
        script.check()

    return play


def restarts() -> Iterator[tuple[Script, Play]]:
    for name, title, play in (
        ("restart", "engine restarted (numbers from 0), replay works", _restart()),
        ("restart-no-replay", "engine restarted, no replay endpoint", _restart(replay="none")),
        ("restart-idle", "engine restarted, idle since: it holds nothing", _restart_idle),
        ("restart-ahead", "engine restarted, its numbers past the old ones when the connection is back", _restart_ahead),
        (
            "restart-same-number",
            "engine restarted, as far as before when the connection is back, idle",
            _restart_same_number,
        ),
        ("restarts", "engine restarted three times", _restarts),
        ("gone", "the engine is gone", _gone),
    ):
        yield Script(name, title, "restarts"), play
    again = Script(
        "register-again",
        "engine restarted, unregistered and registered again",
        "restarts",
        needs=["register", "unregister"],
    )
    yield again, _registered_again
    for name, title, play in (
        ("killed", "target killed and started again, two batches meanwhile, the engine idle", _killed()),
        ("killed-then-live", "target killed and started again, two batches meanwhile, then a live one", _killed(play_on=True)),
        ("killed-both", "target and engine restarted, the engine's numbers past the old ones, idle", _killed(both=True)),
        (
            "killed-both-then-live",
            "target and engine restarted, the engine's numbers past the old ones, then a live batch",
            _killed(both=True, play_on=True),
        ),
    ):
        yield Script(name, title, "restarts", needs=["kill"]), play
