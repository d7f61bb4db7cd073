"""The process's limit of open files, of which client connections must leave enough for everything else."""

from __future__ import annotations

import resource
from typing import Final

import msgspec

from kvevents.service.config import Limits

RESERVED_FILES: Final = 256
"""Files, pipes and sockets that are not client connections. The subscriber checks the room for its engines itself."""
MAX_FILES: Final = 1 << 20
"""Soft limit that the process sets if the hard limit is unlimited."""


def fit_clients(limits: Limits) -> tuple[Limits, str]:
    """Raise the soft limit of open files, and fit `max_clients` into it.

    Returns the limits and a warning, which is empty if `max_clients` did not have to be lowered.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits, ""
    raised = max(soft, MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES))
    if raised > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    room = max(raised - RESERVED_FILES - limits.reserved_clients, raised // 4)
    if limits.max_clients <= room:
        return limits, ""
    warning = (
        f"limits.max_clients is lowered from {limits.max_clients} to {room}, because the process may open {raised} files: "
        "raise that limit (ulimit -Hn, LimitNOFILE), or lower the setting"
    )
    return msgspec.structs.replace(limits, max_clients=room), warning
