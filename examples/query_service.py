"""Ask a service which engine should take a prompt: `python examples/query_service.py MODEL TOKEN,TOKEN,... [--service URL]`.

`kvevents serve` follows the engines and answers HTTP, so a router in any language needs an HTTP client only, here `requests`.
"""

import argparse
import sys
from collections.abc import Sequence

import requests

TIMEOUT = 5.0


def select(session: requests.Session, service: str, model: str, tokens: Sequence[int]) -> str:
    """Return the chosen engine with the reason. Raises `requests.RequestException`."""
    response = session.post(f"{service}/v1/select", json={"model": model, "tokens": tokens}, timeout=TIMEOUT)
    if not response.ok:
        message = response.json()["detail"]  # a problem of RFC 9457
        raise requests.HTTPError(f"{service} answered {response.status_code}: {message}")
    selection = response.json()
    # A router sends the request to selection["instance"], and weighs what selection["trust"] says: only EXACT is certain.
    return f"{selection['instance']}: {selection['why']}"


def token_ids(text: str) -> list[int]:
    """Token ids, with commas between them."""
    return [int(token) for token in text.split(",")]


def main() -> None:
    """Read the arguments, then ask."""
    parser = argparse.ArgumentParser(description="Ask a service which engine should take a prompt.")
    parser.add_argument("model")
    parser.add_argument("tokens", type=token_ids, help="such as 1,2,3")
    parser.add_argument("--service", default="http://127.0.0.1:8090", metavar="URL")
    given = parser.parse_args()
    with requests.Session() as session:  # keeps its connection; a router has one for all requests
        try:
            print(select(session, given.service, given.model, given.tokens))
        except requests.ConnectionError:
            sys.exit(f"query_service.py: no service answers at {given.service}; start one: kvevents serve")
        except requests.RequestException as error:
            sys.exit(f"query_service.py: {error}")


if __name__ == "__main__":
    main()
