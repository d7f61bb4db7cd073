"""Stores the streams of engines in NATS JetStream, a distributed log, from which any number of indexes can be built."""
