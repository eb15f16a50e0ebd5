// The answer of a replay: each policy's speed-up as a bar, speed against staleness, and the verdict.

import { command, legend, make, section } from "./dom.js";
import { PALETTE } from "./palette.js";
import { scatter } from "./scatter.js";
import { figures } from "./sections.js";

// `answer`: {columns, rows, points}, the rows and the points in the same order; null without training.
export function answerSection({ verdict, warnings, answer, serve }) {
  if (!verdict.length && !warnings.length) return null;
  return section(
    "answer",
    "Answer",
    null,
    answer ? charts(answer) : null,
    ...verdict.map((sentence, at) => make("p", { class: at && !sentence.startsWith("Fastest") ? "" : "answer" }, sentence)),
    serve ? command(serve) : null,
    ...warnings.map((text) => make("p", { class: "warning" }, `Warning: ${text}`)),
  );
}

function charts({ columns, rows, points }) {
  const most = Math.max(...points.map(({ speed_up, high }) => high ?? speed_up));
  const bars = points.map((point) => speedBar(point, most));
  const withBars = rows.map(({ name, cells }, at) => ({ name: breakable(name), cells: [bars[at], ...cells] }));
  const x = { key: "staleness", label: "staleness, versions on average" };
  const y = { key: "speed_up", label: "speed-up", form: (value) => `${value}x` };
  const stale = points.some(({ staleness }) => staleness > 0);
  return make(
    "div",
    {},
    legend([
      ["on the Pareto frontier", PALETTE[5]],
      ["another policy is as good in speed, staleness and bias, and better in one of them", PALETTE[0]],
      ["95 % confidence interval", "var(--text)"],
    ]),
    figures([{ label: "" }, ...columns], withBars),
    stale ? scatter(x, y, points) : null,
  );
}

// A name that may go on in the next line after a word.
const breakable = (name) =>
  make("span", {}, ...name.split(/(?<=[_.=|])/).flatMap((word) => [word, make("wbr")]));

function speedBar({ name, speed_up, low, high, frontier }, most) {
  const bar = make("div", { class: "stack", role: "img", "aria-label": `speed-up of ${name}` });
  const part = make("span");
  part.style.width = `${(100 * speed_up) / most}%`;
  part.style.background = frontier ? PALETTE[5] : PALETTE[0];
  bar.append(part);
  if (low !== null && high > low) {
    const interval = make("i", { class: "interval" });
    interval.style.left = `${(100 * low) / most}%`;
    interval.style.width = `${(100 * (high - low)) / most}%`;
    bar.append(interval);
  }
  return bar;
}
