"""Measures the cost of attestation for the scheduler of vLLM 0.33: `python -m tests.system.vllm_releases.cost [BLOCKS]`.

vLLM's own block pool stores all its blocks, returns the events and evicts all blocks, with the plugin and without it, in
processes that alternate. The figures are CPU time of the thread, medians of `RUNS` runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from statistics import median
from types import SimpleNamespace
from typing import Final

from kvevents.engines import vllm as plugin
from kvevents.engines.plugin import VARIABLE
from tests.system.vllm_releases import stand_ins
from tests.system.vllm_releases.driver import BLOCK_SIZE, Engine
from tests.system.vllm_releases.sources import source

RELEASE: Final = "0.33.0"
RUNS: Final = 3
REQUEST_BLOCKS: Final = 1000
TAKES: Final = 2000
SECONDS: Final = 300.0


def measure(blocks: int, *, has_plugin: bool) -> dict[str, float]:
    """Return microseconds for each stored block, each evicted block, and each `take_events` while all blocks are cached."""
    os.environ[VARIABLE] = '{"heartbeat": 3600, "compact": false}' if has_plugin else "off"
    stand_ins.install(source(RELEASE))
    plugin.register()
    engine = Engine(is_hybrid=False, blocks=blocks + 1)
    pool, found = engine.manager.block_pool, {}
    tokens = list(range(REQUEST_BLOCKS * BLOCK_SIZE))
    ids: list[int] = []
    spent = 0.0
    for first in range(0, blocks, REQUEST_BLOCKS):
        hashes = [(first + index).to_bytes(32, "big") for index in range(REQUEST_BLOCKS)]
        request = SimpleNamespace(
            block_hashes=hashes, all_token_ids=tokens, lora_request=None, session_id=None, mm_features=[], cache_salt=None,
            prompt_embeds=None, request_id="request",
        )  # fmt: skip
        new = pool.get_new_blocks(REQUEST_BLOCKS)
        ids += [block.block_id for block in new]
        start = time.thread_time()
        pool.cache_full_blocks(request, new, 0, REQUEST_BLOCKS, BLOCK_SIZE, 0)
        spent += time.thread_time() - start
        pool.free_blocks(new)
        pool.take_events()
    found["store"] = spent / blocks * 1e6
    start = time.thread_time()
    for _ in range(TAKES):
        engine.manager.take_events()
    found["take_events"] = (time.thread_time() - start) / TAKES * 1e6
    start = time.thread_time()
    pool.evict_blocks(set(ids))
    found["evict"] = (time.thread_time() - start) / blocks * 1e6
    engine.publisher.shutdown()
    return found


def main() -> None:
    """Print the figures, or, as the process of one run, those of that run as JSON."""
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    if len(sys.argv) > 2:
        print(json.dumps(measure(blocks, has_plugin=sys.argv[2] == "plugin")))
        return
    runs: dict[str, list[dict[str, float]]] = {"vllm": [], "plugin": []}
    for _ in range(RUNS):
        for kind, found in runs.items():
            command = [sys.executable, "-m", "tests.system.vllm_releases.cost", str(blocks), kind]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=SECONDS)
            found.append(json.loads(done.stdout))
    print(f"vLLM {RELEASE}, {blocks:,} blocks, microseconds of CPU time, medians of {RUNS} runs")
    for name in runs["vllm"][0]:
        own, ours = (median(each[name] for each in runs[kind]) for kind in ("vllm", "plugin"))
        print(f"{name}: vLLM {own:.3f}, with the plugin {ours:.3f}")


if __name__ == "__main__":
    main()
