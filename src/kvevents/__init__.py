"""KV cache events of LLM inference engines: publish, subscribe and replay them, losing nothing."""
