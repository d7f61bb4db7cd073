"""The fleet: its members, what their streams report, and who listens to it."""
