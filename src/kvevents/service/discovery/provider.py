"""The interface of discovery providers. A provider is one way to find engines.

A new provider, such as one for Kubernetes EndpointSlices, is one more module with one class. The class has a name and a
`watch()` that yields findings. A finding contains registrations (`Template.registrations` makes those of all ranks of an
engine). It can also contain further providers, such as an `EngineProvider` for each address; `ProviderRunner` runs those too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from kvevents.service.registration import Registration, Scope


@dataclass(frozen=True, slots=True)
class DiscoveryFault:
    """Something that a provider could not find out: a name that does not resolve, a missing rank, a malformed file."""

    subject: str
    """The instance, file or host name that the fault is about."""
    sentence: str
    """What happened and what to do, for people."""


@dataclass(frozen=True, slots=True)
class Finding:
    """All that one provider knows now. A registration that is no longer in it is removed."""

    registrations: tuple[Registration, ...] = ()
    faults: tuple[DiscoveryFault, ...] = ()
    providers: tuple[Provider, ...] = ()
    """Further providers, such as engines to query. Each one runs for as long as a finding contains an equal one."""
    adapters: tuple[Scope, ...] = ()
    """LoRA adapters that requests name as their model: the base model of each, and its name as `lora`."""


class Provider(Protocol):
    """One way to find engines. Providers are hashable. Two are equal if they find the same engines in the same way."""

    @property
    def name(self) -> str:
        """The name in logs and metrics, such as `file /etc/fleet.toml`."""
        ...

    def watch(self) -> AsyncGenerator[Finding, None]:
        """Yield the first finding, and another one after each change, until the generator is closed or its task is cancelled.

        It does not raise for failures outside this process. Those are faults of a finding, which keeps the registrations that
        the provider knew before. If the generator ends, its last finding stays valid.
        """
        ...
