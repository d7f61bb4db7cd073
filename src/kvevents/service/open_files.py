"""Open files of the process: connections of clients must leave enough of them for all else, or nobody is answered."""

from __future__ import annotations

import resource
from typing import Final

import msgspec

from kvevents.service.config import Limits

OTHERS: Final = 256
"""Files, pipes and sockets besides those of clients; connections to many engines are looked after where they are made."""
MOST: Final = 1 << 20
"""To which the limit is lifted where there is none."""


def fit_clients(limits: Limits) -> tuple[Limits, str]:
    """Lift the soft limit of open files to the hard one. Returns limits that fit, and a sentence if they are lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits, ""
    lifted = max(soft, MOST if hard == resource.RLIM_INFINITY else min(hard, MOST))
    if lifted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lifted, hard))
    room = max(lifted - OTHERS - limits.reserved_clients, lifted // 4)
    if limits.max_clients <= room:
        return limits, ""
    sentence = (
        f"limits.max_clients is {room} rather than {limits.max_clients}: the process may have {lifted} files open; "
        "raise that (ulimit -Hn, LimitNOFILE), or lower the setting"
    )
    return msgspec.structs.replace(limits, max_clients=room), sentence
