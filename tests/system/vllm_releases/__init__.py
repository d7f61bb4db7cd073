"""The plugin for vLLM with the classes of many releases of vLLM, each executed out of its source distribution.

`python -m tests.system.vllm_releases` downloads the sources (about 30 MB for each release, once) and prints a table. These
parts of each release run unchanged: the factory and the publisher, the block pool, the KV cache manager with its coordinator,
requests, and the scheduler's reset of the cache. Other modules of vLLM, and torch, are stand-ins. `make engines` runs a real
server.
"""
