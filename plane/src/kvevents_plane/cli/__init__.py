"""The commands that the plane adds to the program `kvevents`."""
