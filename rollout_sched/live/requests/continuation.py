"""What each field of a request means for a response that is cut and goes on.

A response goes on as a new request to an engine, whose prompt ends with the tokens so far. vLLM
applies most fields to one token at a time, so they can be sent again. Some it applies to a request
as one piece: it counts `min_tokens`, looks for stop strings and advances grammars over the tokens
that this request makes, and seeds one generator for it. Sent again, these would give another
response than one that was not cut (TGI 1039, LightLLM 1440, dynamo 7634, vLLM 48853).

`FIELDS` has a rule for every field of the request classes of vLLM 0.32 and 0.33 (`SamplingParams`,
`CompletionRequest`, `ChatCompletionRequest`, `GenerateRequest`), whichever endpoint has it: equal
names mean the same. A field without a rule may mean anything, so a response with it starts over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from rollout_sched.core.model.events import Spans

Rule = Literal["same", "reduced", "varied", "first", "prompt", "ours", "searched", "whole"]

#: What is done with a field, by its rule.
MEANING: dict[Rule, str] = {
    "same": "sent again: it applies to each token",
    "reduced": "sent again, less the tokens that the response has",
    "varied": "another seed for each attempt, from the seed and the tokens so far: the same cuts "
    "give the same seeds, and no random number comes twice",
    "first": "sent with the first attempt only: it is about the prompt",
    "prompt": "not sent again: its effect is in the prompt's token ids",
    "ours": "set by the scheduler for each attempt",
    "searched": "sent again, and one that lies over the interruption is found; a stream starts "
    "over, and so does an answer of /inference/v1/generate, which has no text",
    "whole": "applies to the response as one piece, so a response with it starts over",
}

_BY_RULE: dict[Rule, str] = {
    "same": """
        temperature top_p top_k min_p repetition_penalty stop_token_ids ignore_eos logit_bias
        allowed_token_ids logprobs top_logprobs logprob_token_ids flat_logprobs detokenize
        skip_special_tokens spaces_between_special_tokens include_stop_str_in_output
        skip_reading_prefix_cache thinking_token_budget stream_interval stream_options
        return_tokens_as_token_ids return_weight_versions length_penalty output_kind skip_clone
        parse_context model user watermarking session_id metadata store service_tier
        safety_identifier prompt_cache_key verbosity""",
    "reduced": "min_tokens",
    "varied": "seed",
    "first": """
        prompt_logprobs prompt_logprob_token_ids prompt_logprob_start truncate_prompt_tokens
        truncation_side return_prompt_text return_token_offsets token_offsets""",
    "prompt": """
        prompt messages token_ids chat_template chat_template_kwargs add_generation_prompt
        continue_final_message add_special_tokens documents reasoning_effort include_reasoning
        tool_choice parallel_tool_calls""",
    "ours": """
        n max_tokens max_completion_tokens stream request_id priority cache_salt return_token_ids
        group_id sampling_params""",
    "searched": "stop",
    "whole": """
        bad_words echo output_mode structured_outputs response_format tools presence_penalty
        frequency_penalty repetition_detection use_beam_search prompt_embeds suffix features
        content_parts mm_payload return_mm_kwargs media_io_kwargs mm_processor_kwargs
        kv_transfer_params ec_transfer_params vllm_xargs extra_args routed_experts_prompt_start
        trace_decode_token_ids reasoning_ended reasoning_parser_kwargs""",
}

FIELDS: dict[str, Rule] = {
    field: rule for rule, fields in _BY_RULE.items() for field in fields.split()
}

#: Fields that never keep a response from going on.
RESUMABLE = frozenset(field for field, rule in FIELDS.items() if rule not in ("searched", "whole"))

_FIRST = frozenset(field for field, rule in FIELDS.items() if rule == "first")

#: Values that ask for nothing, beside None, False, 0 and empty ones.
_DEFAULTS = {"response_format": {"type": "text"}, "output_mode": "tokens"}


def hindrance(fields: Mapping[str, Any], *, searched: bool) -> str:
    """The first of these request fields with which a response cannot go on; "" if it can.
    `searched`: its text is known, and searched over the cut."""
    for name, value in fields.items():
        if name in RESUMABLE or (searched and FIELDS.get(name) == "searched"):
            continue
        if value and value != _DEFAULTS.get(name):
            return name
    return ""


#: Steps of the seed from one token to the next: odd, so no two of 2**63 counts give one seed. The
#: samples of a group have neighbouring seeds, which this keeps far apart.
_STRIDE = 0x9E3779B97F4A7C15


def seed_after(seed: int, tokens: int) -> int:
    """The seed of an attempt that goes on after this many response tokens; vLLM's 64 bits."""
    return (seed + _STRIDE * tokens) % 2**63 if tokens else seed


def resumed(fields: Mapping[str, Any], tokens: int, limit: int) -> dict[str, Any]:
    """The sampling fields of an attempt that goes on after `tokens` response tokens and makes at
    most `limit`. Numbers may be text, as vLLM accepts it."""
    sent = {name: value for name, value in fields.items() if not tokens or name not in _FIRST}
    if sent.get("min_tokens"):
        # A part may be shorter than the least length of the response: it never ends by itself then.
        sent["min_tokens"] = min(max(0, int(sent["min_tokens"]) - tokens), limit)
    if sent.get("seed") is not None and int(sent["seed"]) != -1:  # -1: none
        sent["seed"] = seed_after(int(sent["seed"]), tokens)
    return sent


class StopStrings(NamedTuple):
    """The stop strings of a request, the tokens that it makes before one may end it, and whether
    its text keeps the one that does.

    An engine looks for them in the text of its own attempt, so we look for one that begins before a
    cut and ends after it. No token is made again for it: of those that are drawn at random, some
    would then be more likely than others.
    """

    strings: list[str]
    min_tokens: int
    included: bool = False

    @property
    def longest(self) -> int:
        return max(map(len, self.strings), default=0)

    def over_the_cut(self, before: str, after: str) -> Iterator[tuple[int, int, int]]:
        """(characters of it after the cut, its place in the list, characters before the cut)."""
        text, cut = before + after, len(before)
        for place, stop in enumerate(self.strings):
            for start in range(max(0, cut - len(stop) + 1), cut):
                if text.startswith(stop, start):
                    yield start + len(stop) - cut, place, cut - start


def spans_until(spans: Spans, tokens: int) -> Spans:
    """The spans of the first so many tokens."""
    kept = []
    for version, count in spans:
        if tokens > 0:
            kept.append((version, min(count, tokens)))
        tokens -= count
    return tuple(kept)


def table() -> str:
    """The rules as a table in Markdown, for docs/gateway.md."""
    rows = [
        f"| {', '.join(f'`{field}`' for field, its in FIELDS.items() if its == rule)} | {means} |"
        for rule, means in MEANING.items()
    ]
    return "\n".join(["| fields | in an attempt that resumes a response |", "|---|---|", *rows])
