"""The simulated cache and engine agree with vLLM's block manager and scheduler; a short form of `tests.system.vllm_oracle`."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvevents.sim.cache import PrefixCache
from kvevents.sim.pool import Pool
from kvevents.sim.requests import Sequence
from tests.system.vllm_oracle import __main__ as against_vllm
from tests.system.vllm_oracle import lookups as lookup_oracle
from tests.system.vllm_oracle.comparing import Counts
from tests.system.vllm_oracle.histories import CASES, Case
from tests.system.vllm_oracle.vllm_blocks import FOREIGN, RealCache, modules, request
from tools.released import VLLM, at_hand
from wire_cases import DATA

pytestmark = pytest.mark.skipif(
    at_hand(VLLM) is None, reason=f"the wheel of {VLLM.title} is not at hand; `python -m {against_vllm.__name__}` downloads it"
)

SEEDS = range(16)
STEPS = 150


@pytest.mark.parametrize("kind", against_vllm.KINDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_random_histories_have_equal_results(kind: str, case: Case) -> None:
    """Events, cached tokens, admissions, preemptions and free blocks are equal after each step, and each of them occurred."""
    counts = Counts()
    for seed in SEEDS:
        against_vllm.run(kind, case, seed, STEPS, counts)
    assert counts.histories == len(SEEDS)
    assert all((counts.hits, counts.refusals, counts.preemptions, counts.stored, counts.twins, counts.removed))


def test_a_difference_is_printed_with_its_seed_and_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cache of this test frees the beginning of a sequence before its end, unlike vLLM."""

    def release(self: PrefixCache, sequence: Sequence) -> None:
        for table in sequence.tables:
            self.pool.give_back(table)
        sequence.tables, sequence.placed, sequence.computed = (), [], 0

    monkeypatch.setattr(PrefixCache, "release", release)
    assert against_vllm.main(["--kind", "cache", "--only", "full", "--histories", "20"]) == 1
    output = capsys.readouterr().out
    assert output.startswith("cache, full attention, seed ")
    assert ", step " in output
    assert output.endswith("differences: 1\n")


def test_blocks_without_contents_are_reused_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM 0.32 frees them to the front of its queue (`BlockPool.free_blocks`). A pool that appends all blocks differs."""

    def give_back(self: Pool, blocks: Iterable[int]) -> None:
        for block in filter(None, blocks):
            self.uses[block] -= 1
            if not self.uses[block]:
                self._queue[block] = None

    monkeypatch.setattr(Pool, "give_back", give_back)
    assert against_vllm.main(["--kind", "cache", "--only", "full", "--histories", "20"]) == 1
    assert "events:" in capsys.readouterr().out


def test_agreement_is_reported_with_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert against_vllm.main(["--kind", "cache", "--only", "full", "--histories", "2", "--steps", "50"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("cache, full attention: 2 histories, 100 steps, ")
    assert output.endswith("no difference\n")


def test_stand_ins_are_removed_from_sys_modules() -> None:
    before = find_foreign_modules()
    modules()
    assert find_foreign_modules() == before


def find_foreign_modules() -> set[str]:
    """Return the imported modules of libraries that have stand-ins; other tests may have imported the libraries themselves."""
    return {name for name in sys.modules if name.partition(".")[0] in FOREIGN}


def _sha256(value: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def test_hashes_of_the_real_cache_are_those_of_vllm() -> None:
    """A hash is 64 bits of SHA-256 over a chain, which no stand-in could know."""
    cache = RealCache(4, 2)
    prompt = request("r", [1, 2, 3], 2, salt="s")
    assert cache.lookup(prompt) == 0
    assert cache.admit(prompt, 3)
    (stored,) = cache.take_events()
    root = _sha256(os.environ.get("PYTHONHASHSEED", "vllm-none-hash"))
    digest = _sha256((root, (1, 2), (("cache_salt", "s"),)))
    assert (type(stored).__module__, stored.block_hashes) == (VLLM.module, [int.from_bytes(digest[-8:])])


def test_recording_the_histories_again_gives_the_stored_file(tmp_path: Path) -> None:
    """`test_index_captures.py` predicts the stored histories without a wheel."""
    lookup_oracle.record(tmp_path / "again")
    assert lookup_oracle.recorded(tmp_path / "again") == lookup_oracle.recorded(DATA / "vllm-0.32-hybrid.jsonl.gz")


def test_the_index_predicts_the_cached_tokens_of_every_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert lookup_oracle.main(["--histories", "2", "--seed", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(lookup_oracle.SHAPES)
    assert all(", 0 predicted wrongly; " in line for line in lines)
