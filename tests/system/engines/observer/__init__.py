"""A plugin of vLLM that shows an engine core's progress to the test that runs it, and how to read what it shows."""
