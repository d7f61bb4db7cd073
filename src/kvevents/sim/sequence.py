"""One request inside an engine: its token ids, their blocks' hashes, and the blocks that hold it."""

from __future__ import annotations

from array import array
from typing import Final

from kvevents.index import Namespace, block_keys


class Sequence:
    """A prompt and its answer, which is known in advance: the simulation does not compute it."""

    __slots__ = (
        "block_size",
        "boundary",
        "cached",
        "computed",
        "hashes",
        "known",
        "lora",
        "placed",
        "prompt",
        "salt",
        "tables",
        "tokens",
    )

    def __init__(
        self,
        tokens: array[int],
        prompt: int,
        block_size: int,
        seed: str,
        lora: str | None = None,
        salt: str | None = None,
    ) -> None:
        self.tokens: Final = tokens
        """Token ids of the prompt, then of the answer."""
        self.prompt: Final = prompt
        self.block_size: Final = block_size
        self.lora: Final = lora
        self.salt: Final = salt
        # The seed makes hashes differ between engines, as Python's hash seed does in vLLM.
        self.hashes: Final = block_keys(tokens, block_size, Namespace(lora=lora, salt=f"{seed}/{salt or ''}"))
        """Hashes of all complete blocks, chained from the root, unsigned 64-bit integers."""
        self.known = prompt
        """Tokens that can be computed: the prompt, and the answer so far."""
        self.computed = 0
        """Tokens whose keys and values are in the cache, or will be when the step ends."""
        self.cached = 0
        """Tokens of the prompt that were cached at its last admission."""
        self.boundary = 0
        """Tokens that a hybrid model's full attention found in the cache, but its sliding window did not."""
        self.tables: tuple[list[int], ...] = ()
        """Blocks by group; `NULL` for those that a window does not need."""
        self.placed: list[int] = []
        """By group, how many leading blocks were announced as stored."""

    @property
    def remaining(self) -> int:
        """Known tokens that are not computed yet."""
        return self.known - self.computed

    @property
    def answered(self) -> int:
        """Tokens of the answer so far."""
        return self.known - self.prompt

    @property
    def complete(self) -> bool:
        """Whether the answer is complete."""
        return self.known == len(self.tokens)
