"""Paths of the checkout and of the data of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
"""The root of the checkout."""
TESTS: Final = ROOT / "tests"
DATA: Final = TESTS / "data"
