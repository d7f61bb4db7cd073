"""The service: one process that knows a fleet's prefix caches, answers queries, and says how far its answers can be trusted."""
