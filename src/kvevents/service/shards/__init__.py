"""Queries of a fleet whose index is spread over several replicas: their requests to each other, and the merged answers."""
