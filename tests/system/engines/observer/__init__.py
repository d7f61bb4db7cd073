"""A plugin of vLLM that writes the progress of an engine core to a file, and a reader of this file."""
