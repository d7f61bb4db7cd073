"""A source can name the KV cache groups of its draft model; the tests follow the setting from its declaration to the index."""

from __future__ import annotations

import msgspec
import pytest

from kvevents.errors import ConfigError
from kvevents.events import BlockStored
from kvevents.index import PrefixIndex
from kvevents.service.discovery.provider import RankEndpoint, Template
from kvevents.service.errors import ConflictError
from kvevents.service.fleet.registration import Registration, check_same_engine
from kvevents.stream import Batch


def test_a_template_copies_its_draft_groups_to_all_ranks() -> None:
    template = msgspec.convert({"model": "llama", "drafts": []}, Template)
    registration = template.registration("engine-0", "llama", RankEndpoint(rank=0, endpoint="tcp://10.0.0.1:5557"))
    assert registration.drafts == ()
    assert Template(model="llama").drafts is None


def test_ranks_of_an_engine_must_have_the_same_draft_groups() -> None:
    registration_of_rank_0 = Registration(instance="engine-0", endpoint="tcp://10.0.0.1:5557", model="llama", drafts=())
    with pytest.raises(ConflictError, match="draft groups"):
        check_same_engine(registration_of_rank_0, msgspec.structs.replace(registration_of_rank_0, rank=1, drafts=None))


def test_the_last_block_of_a_hit_is_recomputed_while_draft_groups_are_set() -> None:
    """This holds for known and for later streams, until the setting is removed."""
    index = PrefixIndex()
    prompt = list(range(12))

    def store(source: str) -> None:
        event = BlockStored([1, 2, 3], None, prompt, 4, medium="GPU", group_idx=0, kv_cache_spec_kind="full_attention")
        index.apply(Batch(source, 0, 0, 0, 0.0, [event], replayed=False))

    def tokens(source: str, longest: int) -> int:
        match = index.match([*prompt, 50], max_tokens=longest).get(source)
        return match.tokens if match is not None else 0

    store("known")
    for source in ("known", "new"):
        index.set_drafts(source, [])
    store("new")
    assert [tokens(source, 12) for source in ("known", "new")] == [8, 8]
    assert tokens("new", 8) == 4, "with one group, vLLM does not search beyond the blocks that it can use"
    index.set_drafts("known", None)
    assert tokens("known", 12) == 12


@pytest.mark.parametrize("drafts", [["gpu"], [-1], [2**31], list(range(65))])
def test_draft_groups_must_be_valid_group_numbers(drafts: list[object]) -> None:
    with pytest.raises((ConfigError, msgspec.ValidationError), match="drafts"):
        msgspec.convert({"model": "llama", "drafts": drafts}, Template)
