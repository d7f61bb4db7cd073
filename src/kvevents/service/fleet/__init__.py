"""The fleet: its members, the reports of their streams, and the clients that follow its events."""
