"""Real engines beside kvevents: `python -m tests.system.engines`, which `make engines` starts."""
