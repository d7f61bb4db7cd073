"""Chaos: engines, relays and consumers as real processes, under what networks and operators do to them, against the truth."""
