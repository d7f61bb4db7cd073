"""The thread that brings what is followed into the index, and does what it is ordered in between."""

from __future__ import annotations

import threading

from kvevents.index import PrefixIndex
from kvevents.plane.subscriber import LogSubscriber
from kvevents.service.follower import Follower, Listener


def test_an_order_that_nobody_waits_for_any_more_is_passed_over() -> None:
    """It neither is done nor ends the thread, and those after it are done."""
    index = PrefixIndex()
    follower = Follower(LogSubscriber(lambda: 0.0, lambda _: None), index, Listener())
    follower.start()
    begun, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def hold() -> None:
        begun.set()
        go_on.wait(10.0)

    follower.order(hold)
    assert begun.wait(10.0)
    given_up = follower.order(lambda: done.append("given up"))
    assert given_up.cancel()
    go_on.set()
    follower.order(lambda: done.append("waited for")).result(10.0)
    assert done == ["waited for"]
    assert follower.stop()
