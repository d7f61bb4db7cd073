"""Beyond one machine: engines' streams in NATS JetStream, a distributed log, from which any number of indexes are built.

Needs `pip install 'kvevents[plane]'`; `MissingDependencyError` where something is to be connected without.
"""
