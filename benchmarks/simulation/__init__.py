"""The simulated engine held against what a real one does."""
