"""One request inside an engine: its token ids, their blocks' hashes, and the blocks that hold it."""

from __future__ import annotations

from array import array
from typing import Final

from kvevents.index import Namespace, block_keys


class Sequence:
    """A prompt and the answer that will be given, known in advance since nothing here computes it."""

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
        """Of the prompt, then of the answer."""
        self.prompt: Final = prompt
        self.block_size: Final = block_size
        self.lora: Final = lora
        self.salt: Final = salt
        # The salt of an engine's own makes hashes that differ between engines, as Python's hash seed does in vLLM.
        self.hashes: Final = block_keys(tokens, block_size, Namespace(lora=lora, salt=f"{seed}/{salt or ''}"))
        """Of every whole block, chained from the root, unsigned 64 bits."""
        self.known = prompt
        """Tokens that are there to be computed: the prompt, and what was answered so far."""
        self.computed = 0
        """Tokens whose keys and values are in the cache, or will be when the step ends."""
        self.cached = 0
        """Of the prompt, when it was last admitted: tokens that need not be computed."""
        self.boundary = 0
        """Tokens that a hybrid model's full attention found, where its sliding window could not follow."""
        self.tables: tuple[list[int], ...] = ()
        """Blocks by group; `NULL` where a window needs none."""
        self.placed: list[int] = []
        """By group, how many leading blocks have had their contents announced."""

    @property
    def remaining(self) -> int:
        """Tokens known and not yet computed."""
        return self.known - self.computed

    @property
    def answered(self) -> int:
        """Tokens of the answer so far."""
        return self.known - self.prompt

    @property
    def complete(self) -> bool:
        """Whether the whole answer is given."""
        return self.known == len(self.tokens)
