"""A program that runs the service with tracing."""

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
"""A program that enables tracing as `opentelemetry-instrument kvevents serve` does."""
