"""What the commands that publish have in common."""

from __future__ import annotations

import time
from typing import Final

from kvevents.errors import ExternalError

_NAP: Final = 60.0
"""`time.sleep` takes no infinity."""


def stay(seconds: float) -> None:
    """Let the publisher's threads work for `seconds`, which may be infinite, or until Ctrl-C."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _NAP))


def nobody_came(endpoint: str, seconds: float) -> ExternalError:
    """`--wait-for-subscriber` waited in vain."""
    return ExternalError(f"nobody subscribed within {seconds:g} s; `kvevents tail {endpoint}` would")
