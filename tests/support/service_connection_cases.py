"""The options that switch tracing on."""

from __future__ import annotations

from typing import Final

TRACED: Final = """
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from kvevents.cli import main
trace.set_tracer_provider(TracerProvider())
sys.exit(main(["serve", "--port", "0", *sys.argv[1:]]))
"""
"""As `opentelemetry-instrument kvevents serve` does."""
