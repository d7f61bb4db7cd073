"""Writes the scenarios of `kvevents conform`, and the page with the results of released programs."""
