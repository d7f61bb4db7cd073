"""The service: one process that knows a fleet's prefix caches, answers for them, and says how far it can be trusted."""
