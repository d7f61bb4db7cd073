"""Targets that answer how much of a prompt each worker holds: the indexer API of Mooncake's RFC #1403 and of NVIDIA Dynamo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvevents.conform.http import ANSWER_SECONDS, Answer, request
from kvevents.conform.scenario import Ability, Query
from kvevents.conform.target import Registration, RejectedError, Target, TargetError
from kvevents.conform.verdict import Difference

ACCEPTED: Final = frozenset({200, 201})
EXACT: Final = "EXACT"
"""The value of `trust` by rank in an answer (kvevents) with which the indexer vouches for it."""
ABILITIES: Final[frozenset[Ability]] = frozenset({"lora", "ranks", "register", "reports", "salt", "tenants", "unregister"})


class _Match(msgspec.Struct):
    """What an instance holds of a prompt."""

    longest_matched: int
    dp: dict[str, int] = {}
    trust: dict[str, str] = {}


class _Matches(msgspec.Struct):
    """The answer to a query."""

    instances: dict[str, _Match]


class _Listener(msgspec.Struct):
    """What an indexer says of one rank."""

    last_error: str | None = None


class _Worker(msgspec.Struct):
    """What an indexer says of an instance."""

    instance_id: int | str
    status: str
    listeners: dict[str, _Listener] = {}


class Indexer(Target):
    """An indexer at a URL. Workers are instances from `first` on, so that several scenarios can share one indexer."""

    def __init__(self, url: str, model: str = "m", first: int = 1, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._url = url.rstrip("/")
        self._answer_seconds = answer_seconds
        self._model = model
        self._first = first
        self._instances: dict[str, int] = {}

    # --- following

    def register(self, registration: Registration) -> None:
        address = registration.address
        body = {
            "instance_id": self._instances.setdefault(address.worker, self._first + len(self._instances)),
            "model_name": self._model,
            "block_size": registration.block_size,
            "endpoint": address.endpoint,
            "dp_rank": address.rank,
        }
        if address.replay_endpoint is not None:
            body["replay_endpoint"] = address.replay_endpoint
        if registration.tenant is not None:
            body["tenant_id"] = registration.tenant
        answer = self.ask("POST", "/register", body)
        if answer.status not in ACCEPTED:
            del self._instances[address.worker]
            raise RejectedError(answer.text)

    def unregister(self, registration: Registration) -> None:
        body = {"instance_id": self._instances.pop(registration.address.worker), "model_name": self._model}
        if registration.tenant is not None:
            body["tenant_id"] = registration.tenant
        answer = self.ask("POST", "/unregister", body)
        if answer.status not in ACCEPTED:
            raise TargetError(f"{self._url}/unregister answered {answer.text}")

    def close(self) -> None:
        """Unregister everything, so that an indexer that goes on is as it was."""
        for instance in self._instances.values():
            self.ask("POST", "/unregister", {"instance_id": instance, "model_name": self._model})

    # --- answers

    def differences(self, queries: Sequence[Query]) -> list[Difference]:
        return [difference for query in queries for difference in self._compare(query)]

    def _compare(self, query: Query) -> list[Difference]:
        held, said = self._held(query)
        names = dict.fromkeys([*query.held, *held])
        pairs = [(name, query.held.get(name, 0), held.get(name, 0)) for name in names if ":" not in name or name in query.held]
        return [
            Difference(worker := name.partition(":")[0], f"{name}: {found} of {true} tokens", said.get(worker))
            for name, true, found in pairs
            if found != true
        ]

    def _held(self, query: Query) -> tuple[dict[str, int], dict[str, str]]:
        """Return the tokens of the longest prefix by worker and by `worker:rank`, and what the answer says against workers."""
        # kvevents answers what an engine would find, which never includes the last token; Dynamo ignores unknown fields.
        body: dict[str, Any] = {"token_ids": query.ids, "model_name": self._model, "whole_prompt": True}
        body |= {
            field: value
            for field, value in (("lora_name", query.lora), ("cache_salt", query.salt), ("tenant_id", query.tenant))
            if value is not None
        }
        answer = self.ask("POST", "/query", body)
        if answer.status == 404:  # a model without workers
            return {}, {}
        if answer.status != 200:
            raise TargetError(f"{self._url}/query answered {answer.text}")
        names = {str(instance): name for name, instance in self._instances.items()}
        held: dict[str, int] = {}
        said: dict[str, str] = {}
        for instance, each in answer.decode(_Matches).instances.items():
            name = names.get(instance, f"instance-{instance}")
            held[name] = each.longest_matched
            held |= {f"{name}:{rank}": tokens for rank, tokens in each.dp.items()}
            if doubts := sorted({state for state in each.trust.values() if state != EXACT}):
                said[name] = f"the answer is {', '.join(doubts)}"
        return held, said

    def reports(self) -> dict[str, str | None]:
        listed = self.ask("GET", f"/workers?model_name={self._model}").decode(list[_Worker])
        workers = {str(each.instance_id): each for each in listed}
        return {name: _report(workers.get(str(instance))) for name, instance in self._instances.items()}

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """Send one request. Raise `TargetError`."""
        return request(self._url + path, method, body, seconds=self._answer_seconds)


def _report(worker: _Worker | None) -> str | None:
    """Return what `/workers` says against a worker: its status, if that is not `active`, and the last errors."""
    if worker is None:
        return "not listed"
    said = [] if worker.status == "active" else [f"status {worker.status}"]
    said += [each.last_error for each in worker.listeners.values() if each.last_error]
    return "; ".join(dict.fromkeys(said)) or None
