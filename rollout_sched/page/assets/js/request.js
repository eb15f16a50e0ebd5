// Describes a span as text.

import { count, seconds } from "./format.js";

const ALONE = 4294967295;

export function nameOf(record, request) {
  const group = record.groups[record.requests.group[request]];
  const index = record.requests.index[request];
  return index === ALONE ? group : `${group}/${index}`;
}

// [label, text] for each fact; `words` come from metrics.waits and metrics.attempt_spans.
export function described(record, span, words) {
  const { attempts, spans } = record;
  const attempt = spans.attempt[span];
  const request = attempts.request[attempt];
  const alone = record.requests.index[request] === ALONE;
  const start = spans.start[span];
  const context = `${count(attempts.context[attempt])} tokens`;
  const before = attempts.before[attempt];
  return [
    ["request", nameOf(record, request)],
    ["group", alone ? "none: asked by a client" : record.groups[record.requests.group[request]]],
    ["instance", `${record.instances[attempts.instance[attempt]]}, place ${attempts.place[attempt]}`],
    ["version", String(spans.version[span])],
    ["tokens", spans.tokens[span] ? count(spans.tokens[span]) : "not known"],
    ["time", `${seconds(start)} to ${seconds(start + spans.length[span])}`],
    ["began with", before ? `${context}, ${count(before)} of them made before` : context],
    ...(attempts.turn[attempt] ? [["turn", String(attempts.turn[attempt] + 1)]] : []),
    ["waited", waited(attempts, attempt, words)],
    ["ended", words.outcomes[attempts.outcome[attempt]]],
  ];
}

function waited(attempts, attempt, words) {
  const time = attempts.waited[attempt];
  if (time < 0.005) return "not at all";
  const since = words.since[attempts.since[attempt]];
  return `${seconds(time)} since ${since}; ${words.causes[attempts.cause[attempt]]}`;
}
