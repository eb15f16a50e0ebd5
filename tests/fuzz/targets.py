"""All targets."""

from __future__ import annotations

from tests.fuzz.answer_scans import AnswerScans
from tests.fuzz.answers import Answers
from tests.fuzz.calls import Calls
from tests.fuzz.control_calls import ControlCalls
from tests.fuzz.endpoints_files import EndpointsFiles
from tests.fuzz.envelope import Envelope
from tests.fuzz.http_client import Client
from tests.fuzz.http_server import Server
from tests.fuzz.orders import Orders
from tests.fuzz.store_files import StoreFiles
from tests.fuzz.streams import Streams
from tests.fuzz.target import Target
from tests.fuzz.toml_files import policies, scenarios
from tests.fuzz.trace_files import TraceFiles

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Server(),
        Client(),
        Envelope(),
        Calls(),
        Answers(),
        AnswerScans(),
        Streams(),
        Orders(),
        StoreFiles(),
        ControlCalls(),
        policies(),
        scenarios(),
        TraceFiles(),
        EndpointsFiles(),
    )
}
