// The six figures at the top of the live page, each with its last minutes, or its last steps, as a line.

import { make } from "./dom.js";
import { count, seconds } from "./format.js";

const SPACE = "http://www.w3.org/2000/svg";
const SPARK_WIDTH = 100;
const SPARK_HEIGHT = 30;

export function headline(state, columns) {
  return [...flow(state, columns), ...training(state, columns)].map(tile);
}

function flow({ instances }, { tokensPerS, idle }) {
  const serving = instances.filter(({ status }) => status === "serving").length;
  return [
    {
      label: "tokens/s",
      value: known(tokensPerS.at(-1), count),
      about: `generated; ${serving} of ${instances.length} instances serve`,
      line: tokensPerS,
    },
    { label: "idle", value: known(idle.at(-1), inWhole), about: "of the fleet, in the last 10 s", line: idle, most: 1 },
  ];
}

function training(state, { open, idleS, fleetS }) {
  const { step, steps, staleness, prompts_per_step: wanted, trainer_waiting: waiting } = state;
  const last = steps.at(-1);
  const any = steps.length > 0 || Object.values(state.groups).some((groups) => groups > 0);
  const waits = steps.slice(1).map((each, at) => waitingShare(each, steps[at]));
  const ages = Object.entries(staleness);
  const samples = ages.reduce((all, [, of]) => all + of, 0);
  const mean = ages.reduce((all, [age, of]) => all + age * of, 0) / samples;
  const hours = (seconds_) => hoursOf(seconds_ / 3600);
  return [
    {
      label: "tail of this step",
      value: any ? `${open.at(-1)} of ${wanted}` : "\u2013",
      about: any ? `groups open, ${seconds(step.elapsed_s)} into it${tailBefore(last)}` : "no groups yet",
      line: open,
      most: wanted,
    },
    {
      label: "staleness",
      value: known(last?.max_staleness, String),
      about: samples ? `versions at most; mean ${mean.toFixed(1)}` : "versions at most, in the last step",
      line: steps.map(({ max_staleness: most }) => most),
    },
    {
      label: "trainer waiting",
      value: known(waits.at(-1), inWhole),
      about: waiting ? "of the last step; it waits now" : "of the last step",
      line: waits,
      most: 1,
    },
    {
      label: "instance-hours idle",
      value: hours(idleS.at(-1)),
      about: `of ${hours(fleetS.at(-1))} since the gateway started`,
      line: idleS.map((value) => value - idleS[0]),
    },
  ];
}

const known = (value, form) => (value === null || value === undefined ? "\u2013" : form(value));

const inWhole = (share) => `${Math.round(100 * share)} %`;

const hoursOf = (hours) => (hours < 10 ? hours.toFixed(2) : count(hours));

const waitingShare = (step, before) => Math.min(1, step.trainer_wait_s / Math.max(1e-9, step.end_s - before.end_s));

function tailBefore(step) {
  if (!step || step.t50_s === null) return "";
  return `; the last: t50 ${seconds(step.t50_s)}, t99 ${seconds(step.t99_s)}`;
}

// `most`: the top of the line's scale, if it has one of its own.
function tile({ label, value, about, line, most }) {
  return make(
    "div",
    { class: "figure", role: "group", "aria-label": label },
    make("div", { class: "label" }, label),
    make("div", { class: "value" }, value),
    sparkline(line, most),
    make("div", { class: "about" }, about),
  );
}

function sparkline(values, most) {
  const top = most ?? Math.max(...values.filter((value) => value !== null), 1e-9);
  const step = SPARK_WIDTH / Math.max(1, values.length - 1);
  const points = values
    .map((value, at) => (value === null ? "" : `${(at * step).toFixed(1)},${(SPARK_HEIGHT * (1 - value / top)).toFixed(1)}`))
    .filter(Boolean);
  const svg = drawn("svg", { viewBox: `0 0 ${SPARK_WIDTH} ${SPARK_HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  if (points.length < 2) return svg;
  const [first, last] = [points[0], points.at(-1)].map((point) => point.split(",")[0]);
  svg.append(
    drawn("polygon", { points: `${first},${SPARK_HEIGHT} ${points.join(" ")} ${last},${SPARK_HEIGHT}` }),
    drawn("polyline", { points: points.join(" ") }),
  );
  return svg;
}

function drawn(tag, attributes) {
  const element = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
