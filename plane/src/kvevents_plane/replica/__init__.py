"""A replica: an index that is built from the log of a plane."""
