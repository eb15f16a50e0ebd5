"""HTTP/1.1 for the hot path: `Pool` for calls to instances, `HttpServer` for calls of clients."""

from rollout_sched.integrations.http.client import HttpResponse, Pool
from rollout_sched.integrations.http.client_connection import Exchange, Receiver
from rollout_sched.integrations.http.connections import ServerLimits
from rollout_sched.integrations.http.errors import AnswerBroken, ExchangeError, NotConnected
from rollout_sched.integrations.http.heads import Headers
from rollout_sched.integrations.http.request import ReceivedRequest
from rollout_sched.integrations.http.server import App, HttpServer

__all__ = [
    "AnswerBroken",
    "App",
    "Exchange",
    "ExchangeError",
    "Headers",
    "HttpResponse",
    "HttpServer",
    "NotConnected",
    "Pool",
    "ReceivedRequest",
    "Receiver",
    "ServerLimits",
]
