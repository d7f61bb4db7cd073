"""Tests the conformance of programs that read or send KV cache events: scenarios as data, and a referee that plays them.

The page `reference/conformance.md` of the documentation describes the format of scenarios, the verdicts and the command.
"""

from __future__ import annotations
