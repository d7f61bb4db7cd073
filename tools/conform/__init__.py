"""Plays the scenarios of `kvevents conform` with released programs, and writes the page with the results."""
