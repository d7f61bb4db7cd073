"""The parts of `kvevents doctor`: each module looks at one thing and returns findings."""
