"""A client of the service, and the types of its requests and answers (`kvevents.client.schemas`)."""

from kvevents.client.reasons import Reason
from kvevents.client.service_client import ServiceClient, ServiceRequestError

__all__ = ["Reason", "ServiceClient", "ServiceRequestError"]
