"""The service over HTTP: a table of endpoints, and an ASGI application that serves it."""
