"""Conformance of programs that read or send KV cache events: scenarios as data, and a referee that plays them.

`docs/reference/conformance.md` describes the format of scenarios, the verdicts and the command `kvevents conform`.
"""

from __future__ import annotations
