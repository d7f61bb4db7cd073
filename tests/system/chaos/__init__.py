"""Chaos: faults in engines, relays, consumers and networks. The blocks that consumers hold are compared with the truth."""
