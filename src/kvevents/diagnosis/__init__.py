"""Checks of an engine, or of a service with its engines. Findings are data; the command line and pages render them."""
