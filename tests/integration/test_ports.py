"""A port that a test chooses is never given to another one: tests run in several processes, and each binds its ports some time
later."""

from __future__ import annotations

import subprocess
import sys

import paths
from tools.ports import reserve_adjacent_ports, reserve_port, reserve_ports


def evaluate_in_another_process(expression: str) -> str:
    """Return the output of another process that evaluates `expression` and ends."""
    command = [sys.executable, "-c", f"from tools import ports; print({expression})"]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=paths.ROOT).stdout.strip()


def test_a_port_that_one_process_has_chosen_is_not_given_to_another() -> None:
    """It is reserved before anything listens there."""
    port = reserve_port()
    assert evaluate_in_another_process(f"ports.reserve_ports({port})") == "False"
    assert not reserve_ports(port)


def test_adjacent_ports_are_reserved_together() -> None:
    first = reserve_adjacent_ports(4)
    assert [reserve_ports(port) for port in range(first, first + 4)] == [False] * 4


def test_leasing_several_ports_reserves_all_or_none() -> None:
    """A process that ends releases its ports."""
    reserved, free = reserve_port(), int(evaluate_in_another_process("ports.reserve_port()"))
    assert not reserve_ports(free, reserved)
    assert evaluate_in_another_process(f"ports.reserve_ports({free})") == "True"
