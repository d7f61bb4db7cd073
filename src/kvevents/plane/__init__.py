"""Beyond one machine: engines' streams in NATS JetStream, a distributed log, from which any number of indexes are built.

Needs `pip install 'kvevents[plane]'`; connecting without it raises `MissingDependencyError`.
"""
