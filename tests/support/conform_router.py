"""A router that follows live messages only, for tests of `kvevents conform`: `conform_router.py PORT URL,... ENDPOINT,...`."""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

from conform_cases import NaiveIndexer, serve


class NaiveRouter:
    """Sends each prompt to the worker with the longest prefix match, or to the first worker if none matches."""

    def __init__(self, urls: list[str], endpoints: list[str]) -> None:
        self._urls = urls
        self._indexer = NaiveIndexer("ignores")
        for number, endpoint in enumerate(endpoints):
            self._indexer.answer("POST", "/register", {"instance_id": number, "model_name": "m", "endpoint": endpoint})

    def answer(self, _: str, path: str, body: Any) -> tuple[int, Any]:
        tokens = [int(word) for word in body["prompt"].split()]
        found = self._indexer.answer("POST", "/query", {"token_ids": tokens})[1]["instances"]
        best = max(found, key=lambda name: found[name]["longest_matched"], default="0")
        request = urllib.request.Request(self._urls[int(best)] + path, json.dumps(body).encode())  # noqa: S310 - the referee's
        with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310 - as above
            return 200, json.loads(response.read())

    def close(self) -> None:
        self._indexer.close()


if __name__ == "__main__":
    router = NaiveRouter(sys.argv[2].split(","), sys.argv[3].split(","))
    serve(router.answer, int(sys.argv[1])).serve_forever()
