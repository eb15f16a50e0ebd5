"""The header lines with a trace context (W3C Trace Context), which vLLM reads."""

from __future__ import annotations

import re
from collections.abc import Callable

#: Matches (name, value) of each such line, among header lines that end with CRLF.
TRACE_LINE = re.compile(rb"(?im)^(traceparent|tracestate): ?([^\r\n]*)\r\n")

#: The lines for an order, by its id.
TraceLines = Callable[[str], bytes]


def no_trace(order_id: str) -> bytes:
    """For runs without tracing."""
    return b""


def renamed(header_lines: bytes, trace: bytes) -> bytes:
    """The header lines with `trace` in place of the client's trace; unchanged if `trace` is
    empty."""
    return TRACE_LINE.sub(b"", header_lines) + trace if trace else header_lines
