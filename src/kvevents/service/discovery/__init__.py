"""Discovery of engines: one interface, and one module for each way to find engines."""
