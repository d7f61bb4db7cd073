"""Chaos of a plane: faults in engines, bridges, servers and replicas. The blocks of replicas are compared with the truth."""
