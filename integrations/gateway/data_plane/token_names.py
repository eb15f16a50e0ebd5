"""Log-probabilities of /inference/v1/generate name their token twice, whatever the instance says.

vLLM wrote `"token":"token_id:5"`, and writes `"token_id":5` in 0.32 (its pull requests 57574 and
58181). Clients want the one or the other: renderers 0.1.12 raises an error without the name. What
is missing is written beside what is there; nothing is decoded for it, and what has both, or another
`token`, stays as it is.
"""

from __future__ import annotations

import re

#: A quote within a text is escaped, so these are keys wherever they stand.
_ID = re.compile(rb'"token_id"\s*:\s*(\d+)')
_NAME = re.compile(rb'"token"\s*:\s*"token_id:(\d+)"')


def both_spellings(data: bytes) -> bytes:
    """A whole answer, or whole events of one that is streamed.

    Costs a quarter of a microsecond for each token that is named, and each candidate.
    """
    has_id = data.find(b'"token_id"') >= 0
    if data.find(b'"token"') < 0:
        pieces = _ID.split(data) if has_id else []
    else:
        pieces = [] if has_id else _NAME.split(data)
    if len(pieces) < 3:
        return data
    pieces[1::2] = [b'"token":"token_id:%b","token_id":%b' % (i, i) for i in pieces[1::2]]
    return b"".join(pieces)
