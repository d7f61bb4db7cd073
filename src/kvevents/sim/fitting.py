"""Fits a cost model to measurements of a real engine.

Two kinds of measurement are enough, and any load generator takes them: the time to the first token of single prompts of
several lengths, on an idle engine and never sent before; and the time between tokens with several sequences side by side. The
first are bound by arithmetic, `step + token x n + pair x n(n+1)/2`; the second by memory, `step + weights + context x c`, of
which the sum of the first two is fitted and `step` taken off. Relative errors are what is made small, and no coefficient is
negative.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Final, Literal

import msgspec

from kvevents.errors import ConfigError
from kvevents.sim.costs import CostModel

MIN_PREFILLS: Final = 3
MIN_DECODES: Final = 2
"""Fewest measurements of different sizes that determine a line or a parabola."""


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measurement. Raises `ConfigError` for impossible values."""

    kind: Literal["prefill", "decode"]
    tokens: int
    """`prefill`: length of the prompt. `decode`: tokens that each sequence held."""
    sequences: int
    """Sequences that ran at the same time; 1 for `prefill`."""
    seconds: float
    """`prefill`: time to the first token. `decode`: time between two tokens."""

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.sequences < 1 or not 0 < self.seconds < float("inf"):
            raise ConfigError("tokens and sequences are 1 or more, and seconds above 0")

    @property
    def context(self) -> int:
        """Tokens of all sequences together."""
        return self.tokens * self.sequences


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A cost model, and its errors compared with the measurements."""

    model: CostModel
    prefill_error: float
    """Mean of `|predicted - measured| / measured`."""
    decode_error: float


def read_measurements(path: str | Path) -> list[Measurement]:
    """Read a CSV file with the header `kind,tokens,sequences,seconds`. Raises `ConfigError` with file and line."""
    found: list[Measurement] = []
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                try:
                    found.append(msgspec.convert(row, Measurement, strict=False))
                except (msgspec.ValidationError, ConfigError) as error:
                    wanted = "prefill,8192,1,0.61 or decode,4096,32,0.03"
                    raise ConfigError(f"{path}, line {number}: {error}; a row is like {wanted}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return found


def fit(measurements: Iterable[Measurement], *, cache_tokens: int, reload: float = 0.0, source: str) -> Fit:
    """Return the cost model that is closest to the measurements. Raises `ConfigError` if there are too few."""
    rows = list(measurements)
    prefills = [row for row in rows if row.kind == "prefill"]
    decodes = [row for row in rows if row.kind == "decode"]
    _check(prefills, decodes)
    lengths = [row.tokens for row in prefills]
    step, token, pair = _least_squares([(1.0, float(n), n * (n + 1) / 2) for n in lengths], [row.seconds for row in prefills])
    base, context = _least_squares([(1.0, float(row.context)) for row in decodes], [row.seconds for row in decodes])
    # Where decoding is faster than the shortest prefill promises, the step is what decoding shows.
    step = min(step, base)
    model = CostModel(
        step=step,
        token=token,
        pair=pair,
        weights=base - step,
        context=context,
        reload=reload,
        cache_tokens=cache_tokens,
        source=source,
    )
    return Fit(model=model, prefill_error=_error(model, prefills), decode_error=_error(model, decodes))


def _check(prefills: Sequence[Measurement], decodes: Sequence[Measurement]) -> None:
    if len({row.tokens for row in prefills}) < MIN_PREFILLS:
        raise ConfigError(f"there are too few rows of kind prefill; measure prompts of at least {MIN_PREFILLS} lengths")
    if len({row.context for row in decodes}) < MIN_DECODES:
        raise ConfigError(
            f"there are too few rows of kind decode; measure at least {MIN_DECODES} with different tokens x sequences"
        )


def _error(model: CostModel, rows: Sequence[Measurement]) -> float:
    return sum(abs(_predicted(model, row) - row.seconds) / row.seconds for row in rows) / len(rows)


def _predicted(model: CostModel, row: Measurement) -> float:
    if row.kind == "prefill":
        return model.seconds(row.tokens, row.tokens * (row.tokens + 1) // 2, 0, 0)
    return model.seconds(0, 0, row.sequences, row.context)


def _least_squares(columns: Sequence[tuple[float, ...]], values: Sequence[float]) -> list[float]:
    """Return non-negative coefficients with the smallest sum of squared relative errors.

    There are few columns, so every subset of non-zero coefficients is tried. The best solution without a negative coefficient
    is the result.
    """
    width = len(columns[0])
    rows = [[cell / value for cell in row] for row, value in zip(columns, values, strict=True)]
    best, least = [0.0] * width, float("inf")
    for count in range(1, width + 1):
        for chosen in combinations(range(width), count):
            found = _solve([[row[place] for place in chosen] for row in rows])
            if found is None or min(found) < 0:
                continue
            error = sum((sum(c * row[place] for c, place in zip(found, chosen, strict=True)) - 1) ** 2 for row in rows)
            if error < least:
                least = error
                best = [0.0] * width
                for place, value in zip(chosen, found, strict=True):
                    best[place] = value
    return best


def _solve(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Return the least squares solution of `rows x c = 1` by scaled normal equations; None if it is not unique."""
    width = len(rows[0])
    scales = [max(abs(row[place]) for row in rows) for place in range(width)]
    scaled = [[cell / scale for cell, scale in zip(row, scales, strict=True)] for row in rows]
    matrix = [
        [sum(row[a] * row[b] for row in scaled) for b in range(width)] + [sum(row[a] for row in scaled)] for a in range(width)
    ]
    for place in range(width):
        pivot = max(range(place, width), key=lambda at: abs(matrix[at][place]))
        if abs(matrix[pivot][place]) < _SINGULAR:
            return None
        matrix[place], matrix[pivot] = matrix[pivot], matrix[place]
        for other in range(width):
            if other != place:
                factor = matrix[other][place] / matrix[place][place]
                matrix[other] = [a - factor * b for a, b in zip(matrix[other], matrix[place], strict=True)]
    return [matrix[place][width] / matrix[place][place] / scales[place] for place in range(width)]


_SINGULAR: Final = 1e-12
"""Smallest pivot of a matrix with entries of about 1 whose rows count as independent."""
