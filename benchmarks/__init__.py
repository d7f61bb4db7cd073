"""Ratios against the engines' own released classes, in one run. `python -m benchmarks`; see README.md."""
