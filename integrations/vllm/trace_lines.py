"""The lines of a header that name a trace (W3C Trace Context), which vLLM reads."""

from __future__ import annotations

import re
from collections.abc import Callable

#: (name, value) of each, among header lines that end with CRLF.
TRACE_LINE = re.compile(rb"(?im)^(traceparent|tracestate): ?([^\r\n]*)\r\n")

#: The lines for an order, by its id.
TraceLines = Callable[[str], bytes]


def no_trace(order_id: str) -> bytes:
    """Where nothing is traced."""
    return b""


def renamed(header_lines: bytes, trace: bytes) -> bytes:
    """Those with this trace in place of the one that a client has named; that one, where there is
    no other."""
    return TRACE_LINE.sub(b"", header_lines) + trace if trace else header_lines
