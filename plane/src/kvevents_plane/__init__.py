"""Beyond one machine: engines' streams in NATS JetStream, a distributed log, from which any number of indexes are built."""
