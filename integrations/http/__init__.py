"""HTTP/1.1 for the hot path: `Pool` for calls to instances, `HttpServer` for calls of clients."""

from rollout_sched.integrations.http import server
from rollout_sched.integrations.http.client import Pool, WholeAnswer
from rollout_sched.integrations.http.client_connection import Exchange, Receiver
from rollout_sched.integrations.http.connections import LINGER_S, MAX_BODY, ServerLimits
from rollout_sched.integrations.http.errors import ExchangeError, NotConnected
from rollout_sched.integrations.http.heads import Headers, write_fields
from rollout_sched.integrations.http.request import ReceivedRequest

__all__ = [
    "LINGER_S",
    "MAX_BODY",
    "Exchange",
    "ExchangeError",
    "Headers",
    "NotConnected",
    "Pool",
    "ReceivedRequest",
    "Receiver",
    "ServerLimits",
    "WholeAnswer",
    "server",
    "write_fields",
]
