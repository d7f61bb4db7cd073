"""Send a prompt to the engine that a service selects: `python examples/reserving_router.py MODEL TOKEN,TOKEN,... [URL]`.

Until the answer ends, the service counts the prompt as load of that engine, for all routers that share the service. The engines
are known with the `url` at which they take requests, as with `kvevents serve --engine http://10.0.0.7:8000`. Needs requests.
"""

import sys

import requests

from kvevents.client import Client, ServiceRequestError
from kvevents.client.schemas import SelectRequest

ANSWER_SECONDS = 600.0


def stream_answer(client: Client, model: str, tokens: list[int]) -> None:
    """Print the answer while it arrives. The reservation ends with the answer, also after an error."""
    with client.reserve(SelectRequest(model=model, tokens=tokens)) as worker:
        if worker.url is None:
            sys.exit("reserving_router.py: the service does not know where the engine takes requests; register it with a url")
        body = {"model": model, "prompt": tokens, "stream": True}
        with requests.post(f"{worker.url}/v1/completions", json=body, stream=True, timeout=ANSWER_SECONDS) as response:
            response.raise_for_status()
            chunks = response.iter_content(chunk_size=None)
            first = next(chunks, b"")
            worker.first_token()  # the prompt is computed, and weighs less from now on
            sys.stdout.buffer.write(first)
            sys.stdout.buffer.writelines(chunks)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    model, prompt, *url = sys.argv[1:]
    try:
        with Client(*url or ["http://127.0.0.1:8090"]) as client:
            stream_answer(client, model, [int(token) for token in prompt.split(",")])
    except (ServiceRequestError, requests.RequestException) as error:
        sys.exit(f"reserving_router.py: {error}")
