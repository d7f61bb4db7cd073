"""Ask a service which engine takes a prompt: `python examples/http_router.py MODEL TOKEN,TOKEN,... [URL]`."""

import sys

from kvevents.client import Client, ServiceRequestError
from kvevents.client.schemas import SelectRequest

if len(sys.argv) < 3:
    sys.exit(__doc__)
model, prompt, *url = sys.argv[1:]
request = SelectRequest(model=model, tokens=[int(token) for token in prompt.split(",")])
with Client(*url or ["http://127.0.0.1:8090"]) as client:  # a router has one client for all its threads
    try:
        selection = client.select(request)
    except ServiceRequestError as error:
        sys.exit(f"http_router.py: {error}")
print(selection.instance, selection.url, selection.trust.state, selection.why)
