"""Chaos: faults in engines, relays, consumers and networks. What consumers hold is compared with the truth."""
