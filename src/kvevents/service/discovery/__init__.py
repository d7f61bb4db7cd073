"""Where the service learns of engines: one interface, one module a kind."""
