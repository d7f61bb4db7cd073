"""How much of a prompt each worker holds: `python examples/prefix_index.py [--prompt 1,2,3] [ENDPOINT,REPLAY_ENDPOINT ...]`.

Prints the number of tokens that each worker holds whenever a number changes, until Ctrl-C. The default of `--prompt` is the
prompt that `examples/publish.py` publishes. vLLM always recomputes the last token of a prompt, so a router asks for
`prompt[:-1]`.
"""

import argparse
import sys
from collections.abc import Sequence

from kvevents import KVEventsError, Source, Subscriber
from kvevents.index import PrefixIndex

PUBLISHED = [block for block in range(1, 9) for _ in range(16)]
LOCAL = "tcp://127.0.0.1:5557,tcp://127.0.0.1:5558"


def tokens(text: str) -> list[int]:
    """Token ids, with commas between them."""
    found = [int(token) for token in text.split(",")]
    if not all(0 <= token < 2**32 for token in found):
        raise argparse.ArgumentTypeError("token ids are from 0 to 2**32 - 1")
    return found


def follow(sources: Sequence[Source], prompt: Sequence[int]) -> None:
    """Update the index, and print an answer when its tokens or its trust have changed."""
    index, printed = PrefixIndex(), [""] * len(sources)
    # Raw: the index reads payloads natively. As the sink, the index gets each delivery before `receive` returns it.
    with Subscriber(sources, decode=False, sink=index) as subscriber:
        while True:
            subscriber.receive_many(timeout=1)
            match = index.match(prompt)
            for at, source in enumerate(sources):
                hit = match.get(source.label)
                held = f"{hit.tokens} of {len(prompt)} tokens, by tier {hit.tiers}" if hit else f"0 of {len(prompt)} tokens"
                line = f"{source.label}: {held}, {subscriber.trust(source.label)}"
                if line != printed[at]:
                    printed[at] = line
                    print(line, flush=True)


def main() -> None:
    """Read the arguments, then follow."""
    parser = argparse.ArgumentParser(description="Who holds how much of a prompt.")
    parser.add_argument("--prompt", type=tokens, default=PUBLISHED, help="token ids, such as 1,2,3")
    parser.add_argument("engines", nargs="*", default=[LOCAL], metavar="ENDPOINT,REPLAY_ENDPOINT")
    given = parser.parse_args()
    try:
        pairs = [engine.partition(",") for engine in given.engines]
        sources = [Source(live, replay or None, name=f"engine-{at}") for at, (live, _, replay) in enumerate(pairs)]
        follow(sources, given.prompt)
    except KVEventsError as error:
        sys.exit(f"prefix_index.py: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
