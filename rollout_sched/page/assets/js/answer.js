// The answer of a replay: each policy's speed as a bar, speed against staleness, and the verdict.

import { command, legend, make, section } from "./dom.js";
import { count } from "./format.js";
import { PALETTE } from "./palette.js";
import { scatter } from "./scatter.js";
import { figures, meanings } from "./sections.js";

// `answer`: {columns, rows, points, speed, axes}, the rows and the points in the same order, `speed` and
// `axes` labels; null without training.
export function answerSection({ verdict, warnings, answer, serve }) {
  if (!answer && !verdict.length && !warnings.length) return null;
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

function charts({ columns, rows, points, speed, axes }) {
  const most = Math.max(...points.map(({ speed: reached, high }) => high ?? reached));
  const bars = points.map((point) => speedBar(point, most));
  const withBars = rows.map(({ name, cells }, at) => ({ name: breakable(name), cells: [bars[at], ...cells] }));
  const y = { key: "speed", label: speed, form: most < 100 ? (value) => `${value}x` : count };
  return make(
    "div",
    {},
    legend([
      ["on the Pareto frontier", PALETTE[5]],
      ["another is as good in speed, staleness, bias and GPUs, and better in one of them", PALETTE[0]],
      ...(points.some(({ low }) => low !== null) ? [["95 % confidence interval", "var(--text)"]] : []),
    ]),
    figures([{ label: "" }, ...columns], withBars),
    make("details", {}, make("summary", {}, "What the figures mean"), meanings(columns)),
    make("div", { class: "panels" }, ...axes.map((label) => scatter({ key: label, label }, y, points))),
  );
}

// A name that may go on in the next line after a word.
const breakable = (name) =>
  make("span", {}, ...name.split(/(?<=[_.=|])/).flatMap((word) => [word, make("wbr")]));

function speedBar({ name, speed, low, high, frontier }, most) {
  const bar = make("div", { class: "stack", role: "img", "aria-label": `speed of ${name}` });
  const part = make("span");
  part.style.width = `${(100 * speed) / most}%`;
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
