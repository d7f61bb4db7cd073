"""Where the checkout and the data of the tests are."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
"""The checkout."""
TESTS: Final = ROOT / "tests"
DATA: Final = TESTS / "data"
