"""What one replica answers of the partitions that it shows, to itself and to others."""

from __future__ import annotations

import secrets
import sys
from array import array
from collections.abc import Callable, Collection
from typing import Any, Final, TypeAlias

import msgspec

from kvevents.plane.layout import Layout
from kvevents.service.errors import NotFoundError, RefusedError
from kvevents.service.fleet import Fleet
from kvevents.service.member import Member, Row
from kvevents.service.shards.shapes import (
    Described,
    Expectation,
    Found,
    Members,
    Noted,
    Part,
    Partitions,
    Question,
    within,
)
from kvevents.service.spellings import wall_of

Rows: TypeAlias = list[list[Row]]
"""By prompt."""


class Answering:
    """Answers for a fleet. `layout` is that of its plane, once it is known, and `shown` the partitions that may be told of."""

    def __init__(self, fleet: Fleet, layout: Callable[[], Layout | None], shown: Callable[[], frozenset[int]]) -> None:
        self.fleet: Final = fleet
        self.layout: Final = layout
        self.shown: Final = shown
        self._life: Final = secrets.token_hex(6)

    @property
    def version(self) -> str:
        """Of the members: another one where others have come or gone."""
        return f"{self._life}.{self.fleet.version}"

    def rows(self, question: Question, partitions: Collection[int], prompts: list[Any]) -> Rows:
        """Who in some partitions holds how much. Raises `NotFoundError` for a model that nobody serves here."""
        wall = wall_of(question)
        found = [self.fleet.match(wall, tokens, mm=question.mm, expected=question.expected) for tokens in prompts]
        found += [self.fleet.match_keys(wall, keys, local=question.local) for keys in question.keys]
        return [[row for row in rows if self.partition_of(row.member) in partitions] for rows in found]

    def partition_of(self, member: Member) -> int:
        """Where in the plane an engine is; -1 before the plane was found."""
        layout = self.layout()
        return -1 if layout is None else layout.partition_of(member.registration.key[0])

    # --- to others

    def part(self, question: Question) -> Part:
        """The answer to another replica."""
        partitions = within(question.partitions, self.shown())
        count = len(question.prompts) + len(question.keys)
        try:
            rows = self.rows(question, partitions, [_tokens(prompt) for prompt in question.prompts])
        except NotFoundError:
            return Part(partitions=partitions, known=False, version=self.version, found=[[] for _ in range(count)])
        found = [[_found(row) for row in each] for each in rows]
        return Part(partitions=partitions, known=True, version=self.version, found=found)

    def members(self, asked: Partitions) -> Members:
        """The engines of some partitions."""
        partitions = within(asked.partitions, self.shown())
        members = [member for member in list(self.fleet.members.values()) if self.partition_of(member) in partitions]
        return Members(partitions=partitions, version=self.version, members=[_described(member) for member in members])

    def expect(self, asked: Expectation) -> Noted:
        """Believe for a while that an engine will hold a prompt, if it is one of this replica's."""
        known = self.fleet.expect(wall_of(asked), (asked.instance, asked.rank), _tokens(asked.prompt), asked.seconds)
        return Noted(known=known)


def _tokens(prompt: bytes) -> array[int]:
    if len(prompt) % 4:
        raise RefusedError(
            f"a prompt of {len(prompt)} bytes is not one of 32-bit numbers", "malformed-body", "send 4 bytes a token"
        )
    numbers = array("I", prompt)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _found(row: Row) -> Found:
    name, rank = row.member.registration.key
    trusted = row.member.trusted
    return Found(name, rank, row.gpu, row.cpu, row.disk, row.tokens, trusted.state, trusted.reason, trusted.reason_codes)


def _described(member: Member) -> Described:
    # Nobody but the engine's own replica needs its secrets.
    registration = msgspec.structs.replace(member.registration, salt=None, curve=None)
    digest = member.registration.wall.salt_digest
    return Described(registration=registration, view=member.view(), hidden=member.hidden, salt_digest=digest)
