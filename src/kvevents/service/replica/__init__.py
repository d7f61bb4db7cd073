"""A service whose index is built from a plane's log, alone or as one of several that hold a part each."""
