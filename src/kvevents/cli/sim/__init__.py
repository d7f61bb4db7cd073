"""`kvevents sim`: a fleet of simulated engines."""
