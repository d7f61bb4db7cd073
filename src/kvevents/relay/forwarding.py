"""From what upstreams deliver to what the relay says: payloads as they came, or written anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from kvevents.events import AllBlocksCleared, KVEvent
from kvevents.index import PrefixIndex
from kvevents.relay.merging import Residents
from kvevents.relay.mirror import Mirror
from kvevents.relay.output import Output, costs_events
from kvevents.relay.redaction import Redactor, dropped, hashed
from kvevents.relay.rewriting import Rewriter, places
from kvevents.relay.settings import RelaySettings
from kvevents.stream import Findings, RawBatch

Report = Callable[[RawBatch, Findings], None]


class Forwarding(Protocol):
    """What a relay does with batches."""

    def carry(self, ordinal: int, batches: Sequence[RawBatch]) -> None:
        """Send on batches of one upstream, and report what was found in them."""
        ...

    def forget(self, ordinal: int) -> list[KVEvent]:
        """Events that take back all that an upstream has told; none where it has told nothing."""
        ...

    def residents(self) -> dict[int, Residents]:
        """Whose blocks are whose, where upstreams share the stream."""
        ...

    @property
    def salted(self) -> bool:
        """Whether a prompt with a salt was told by its keys."""
        ...


class Passing:
    """Payloads go on as they came. There is one upstream."""

    salted = False

    def __init__(self, output: Output, report: Report) -> None:
        self._output: Final = output
        self._report: Final = report

    def carry(self, ordinal: int, batches: Sequence[RawBatch]) -> None:
        """See `Forwarding`."""
        applied = self._output.carry(ordinal, batches, [batch.payload for batch in batches])
        for at, outcome in applied.items():
            if outcome.findings is not None:
                self._report(batches[at], outcome.findings)

    def forget(self, ordinal: int) -> list[KVEvent]:  # noqa: ARG002 - there is only one
        """See `Forwarding`."""
        return [AllBlocksCleared()]

    def residents(self) -> dict[int, Residents]:
        """See `Forwarding`."""
        return {}


class Rewriting:
    """Payloads are read and written anew, each upstream's by its own `Rewriter`."""

    def __init__(
        self,
        settings: RelaySettings,
        output: Output,
        plain: Mapping[int, Mirror],
        residents: Mapping[int, Residents],
        report: Report,
        write_mark: Callable[[], None],
    ) -> None:
        self.salted = False
        """See `Forwarding`."""
        self._write_mark: Final = write_mark
        self._output: Final = output
        self._report: Final = report
        self._settings: Final = settings
        self._shared: Final = len(settings.upstreams) > 1
        self._plain: Final = plain
        fields = places(settings.spelling)
        self._redactors: Final[list[Redactor]] = []
        self._rewriters: Final = {
            at: self._rewriter(at, residents.get(at, Residents(fields))) for at in range(len(settings.upstreams))
        }

    def carry(self, ordinal: int, batches: Sequence[RawBatch]) -> None:
        """See `Forwarding`."""
        self._output.note_origin(ordinal, batches)
        for batch in batches:
            self._carry(ordinal, batch)

    def _carry(self, ordinal: int, batch: RawBatch) -> None:
        plain = self._plain.get(ordinal)
        agrees = None
        if plain is not None:
            applied = plain.apply([batch.payload]).get(0)
            # Restored from what was sent, where upstreams share it, it may not have all of one.
            agrees = None if applied is None or applied.findings is None or self._shared else applied.findings.agrees
        found = self._rewriters[ordinal](batch)
        if not self.salted and any(redactor.salted for redactor in self._redactors):
            # Before anything of it is in the journal: a relay that is killed then must know.
            self.salted = True
            self._write_mark()
        findings = Findings(found.rejected, found.cleared, found.heartbeat, agrees)
        if costs_events(findings):
            # Before the batch: a relay that is killed in between says it again.
            self._output.lose()
        self._output.carry(ordinal, [batch] * len(found.payloads), found.payloads)
        if findings != _NOTHING:
            self._report(batch, findings)

    def forget(self, ordinal: int) -> list[KVEvent]:
        """See `Forwarding`."""
        if ordinal in self._plain:
            self._plain[ordinal].reset()
        return self._rewriters[ordinal].forget()

    def residents(self) -> dict[int, Residents]:
        """See `Forwarding`."""
        return {at: each.residents for at, each in self._rewriters.items() if each.residents is not None}

    def _rewriter(self, ordinal: int, residents: Residents) -> Rewriter:
        redact = _REDACTORS[self._settings.tokens](self._plain.get(ordinal))
        if redact is not None:
            self._redactors.append(redact)
        return Rewriter(self._settings.spelling, residents if self._shared else None, redact)


_NOTHING: Final = Findings()


def plain_mirrors(settings: RelaySettings, index: PrefixIndex) -> dict[int, Mirror]:
    """By upstream, its stream as it came: to know the keys of blocks, and whether the upstream's digest is right."""
    return {at: Mirror(index, f"upstream {at}") for at in range(len(settings.upstreams)) if settings.tokens == "hash"}


_REDACTORS: Final[dict[str, Callable[[Mirror | None], Redactor | None]]] = {
    "keep": lambda _: None,
    "hash": lambda plain: None if plain is None else hashed(plain.key_of),
    "drop": lambda _: dropped(),
}
