"""Random requests of a seed, with shared prefixes, continued conversations, LoRA adapters, cache salts and report modes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from tests.system.engines.models import FIRST_TOKEN, VOCABULARY

LONGEST_PROMPT: Final = 270
LONGEST_ANSWER: Final = 40
REMEMBERED: Final = 25
"""Number of the newest conversations that may continue."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request."""

    tokens: list[int]
    answer: int
    """Tokens of the answer."""
    salt: str | None = None
    lora: str | None = None
    is_reported_in_full: bool = False
    """Whether vLLM announces blocks again that it finds in its cache (`kv_cache_report_mode`)."""


@dataclass(frozen=True, slots=True)
class Habits:
    """Distribution of the properties of requests."""

    salts: Sequence[str | None] = (None, None, None, "tenant-0", "tenant-1")
    adapters: Sequence[str | None] = (None,)
    full_reports: float = 0.0
    """Share of requests that are reported in full."""
    roots: int = 4
    """Number of system prompts with which requests begin."""


class Traffic:
    """Makes requests that share prefixes with earlier ones, within blocks and at their ends."""

    def __init__(self, seed: str, habits: Habits, block_size: int) -> None:
        self._draw = Random(seed)
        self._habits = habits
        self._block_size = block_size
        self._roots = [self._draw_tokens(200) for _ in range(habits.roots)]
        self._conversations: deque[list[int]] = deque(maxlen=REMEMBERED)

    def next(self) -> Prompt:
        """Return the next request."""
        draw, habits = self._draw, self._habits
        kind = draw.random()
        if self._conversations and kind < 0.5:  # continues a conversation
            tokens = draw.choice(self._conversations) + self._draw_tokens(draw.randint(1, 60))
        elif self._conversations and kind < 0.65:  # repeats whole blocks, the last of which vLLM computes again
            earlier = draw.choice(self._conversations)
            tokens = earlier[: len(earlier) // self._block_size * self._block_size] or earlier
        elif kind < 0.95:
            tokens = draw.choice(self._roots)[: draw.randint(20, 200)] + self._draw_tokens(draw.randint(1, 80))
        else:
            tokens = self._draw_tokens(draw.randint(1, LONGEST_PROMPT))
        return Prompt(
            tokens[:LONGEST_PROMPT],
            draw.randint(1, LONGEST_ANSWER) if draw.random() < 0.3 else draw.randint(1, 8),
            draw.choice(habits.salts),
            draw.choice(habits.adapters),
            draw.random() < habits.full_reports,
        )

    def unrelated(self) -> Prompt:
        """Return a request that shares no prefix with others, so that the engine makes a step."""
        return Prompt(self._draw_tokens(self._block_size + 1), 1)

    def answered(self, prompt: Prompt, answer: Sequence[int]) -> None:
        """Let later requests continue this conversation."""
        self._conversations.append([*prompt.tokens, *answer])

    def _draw_tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(count)]
