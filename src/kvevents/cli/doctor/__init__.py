"""`kvevents doctor`: examine an engine, or a service with its engines."""

from __future__ import annotations
