"""Compares predictions of the service with real engines: `python -m tests.system.engines`, or `make engines`."""
