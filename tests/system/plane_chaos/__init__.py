"""Rounds of faults done to engines, bridges, servers and replicas, against the truth."""
