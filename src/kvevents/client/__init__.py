"""A client of the service, blocking and asyncio, and the types of its requests and answers (`kvevents.client.schemas`).

::

    request = SelectRequest(model="llama", tokens=tokens)
    with Client("http://127.0.0.1:8090") as client, client.reserve(request) as worker:
        print(worker.url)

The guide is the page `guides/service.md` of the documentation. `AsyncClient` needs the extra `service`.
"""

from typing import TYPE_CHECKING

from kvevents.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from kvevents.client.aio import AsyncClient, AsyncReservedWorker
    from kvevents.client.protocol import ServiceRequestError
    from kvevents.client.reasons import Reason
    from kvevents.client.sync import Client, ReservedWorker

__all__ = ["AsyncClient", "AsyncReservedWorker", "Client", "Reason", "ReservedWorker", "ServiceRequestError"]

__getattr__ = lazy_exports(
    __name__,
    {
        "kvevents.client.aio": "AsyncClient AsyncReservedWorker",
        "kvevents.client.protocol": "ServiceRequestError",
        "kvevents.client.reasons": "Reason",
        "kvevents.client.sync": "Client ReservedWorker",
    },
)
