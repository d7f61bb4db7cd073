"""Ports that tests choose are never given twice: tests run in several processes, and each binds its ports some time later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ports
from ports import lease, quiet_port


def elsewhere(expression: str) -> str:
    """What another process makes of it, which ends then."""
    code = f"import sys; sys.path.insert(0, {str(Path(ports.__file__).parent)!r}); import ports; print({expression})"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_a_port_that_one_process_has_chosen_is_not_given_to_another() -> None:
    """Before anything listens there."""
    port = quiet_port()
    assert elsewhere(f"ports.lease({port})") == "False"
    assert not lease(port)


def test_of_several_ports_all_are_reserved_or_none() -> None:
    """A process that ends gives its ports back."""
    taken, free = quiet_port(), int(elsewhere("ports.quiet_port()"))
    assert not lease(free, taken)
    assert elsewhere(f"ports.lease({free})") == "True"
