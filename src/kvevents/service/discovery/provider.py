"""What every way of finding engines has in common.

A new way, such as Kubernetes' EndpointSlices, is one more module with one class: it has a name and a `watch()` that yields
findings. It names engines by registrations (`Template.registrations` makes those of all ranks), or by further providers, such
as an `EngineProvider` for each address that describes itself, which whoever runs providers (`merge.ProviderRunner`) runs too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from kvevents.service.registration import Registration, Scope


@dataclass(frozen=True, slots=True)
class DiscoveryFault:
    """Something that a provider could not find out: a name that does not resolve, a rank that is missing, a bad file."""

    subject: str
    """What it is about: an instance, a file, a host name."""
    sentence: str
    """What happened and what to do, for people."""


@dataclass(frozen=True, slots=True)
class Finding:
    """All that one provider knows now. What it no longer names is unregistered."""

    registrations: tuple[Registration, ...] = ()
    faults: tuple[DiscoveryFault, ...] = ()
    providers: tuple[Provider, ...] = ()
    """Further ways that it named, such as engines to be asked themselves: each runs for as long as one equal to it is named."""
    adapters: tuple[Scope, ...] = ()
    """LoRA adapters that requests name as their model: the base model of each, and its name as `lora`."""


class Provider(Protocol):
    """One way of finding engines. Hashable; equal to another that would find the same in the same way."""

    @property
    def name(self) -> str:
        """What it is called in logs and metrics, such as `file /etc/fleet.toml`."""
        ...

    def watch(self) -> AsyncGenerator[Finding, None]:
        """What is there at first, and again whenever it has changed, until it is closed or its task cancelled.

        It never raises for what is outside: that is a fault of a finding, which keeps the registrations that it knew before
        where it could not find out otherwise. When it ends by itself, its last finding stays.
        """
        ...
