"""Chaos of a plane: faults in engines, bridges, servers and replicas. What replicas hold is compared with the truth."""
