// A scatter plot as SVG; each point reacts to the pointer and to keyboard focus.

import { hideTooltip, make, panel, showTooltip } from "./dom.js";
import { PALETTE } from "./palette.js";
import { ticks } from "./ticks.js";

const BOX_WIDTH = 340;
const BOX_HEIGHT = 260;
const LEFT = 58;
const BOTTOM = 40;
const LABELLED = 10; // points that can be named beside them
const LETTER = 6.2; // its width, at most, in most names
const SVG = "http://www.w3.org/2000/svg";

function draw(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// `x`, `y`: {key, label, form}: the field of a point to show; points: {name, frontier, [key]: number},
// and `low` and `high` of y if it has an interval.
export function scatter(x, y, points) {
  const most = (key) => (Math.max(...points.map((point) => point[key])) || 1) * 1.08;
  const [mostX, mostY] = [most(x.key), Math.max(most(y.key), ...points.map(({ high }) => high ?? 0))];
  const toX = (value) => LEFT + (value / mostX) * (BOX_WIDTH - LEFT - 10);
  const toY = (value) => BOX_HEIGHT - BOTTOM - (value / mostY) * (BOX_HEIGHT - BOTTOM - 10);
  const svg = draw("svg", { viewBox: `0 0 ${BOX_WIDTH} ${BOX_HEIGHT}`, role: "group", "aria-label": x.label });
  for (const { at, label } of ticks(0, mostX, 5)) {
    svg.append(draw("line", { x1: toX(at), x2: toX(at), y1: 10, y2: BOX_HEIGHT - BOTTOM, class: "grid" }));
    svg.append(draw("text", { x: toX(at), y: BOX_HEIGHT - BOTTOM + 14, "text-anchor": "middle" }, label));
  }
  for (const { at } of ticks(0, mostY, 5)) {
    svg.append(draw("line", { x1: LEFT, x2: BOX_WIDTH - 10, y1: toY(at), y2: toY(at), class: "grid" }));
    svg.append(draw("text", { x: LEFT - 4, y: toY(at) + 4, "text-anchor": "end" }, y.form(at)));
  }
  svg.append(draw("text", { x: (LEFT + BOX_WIDTH) / 2, y: BOX_HEIGHT - 6, "text-anchor": "middle" }, x.label));
  svg.append(
    draw("text", { transform: `translate(12 ${(BOX_HEIGHT - BOTTOM) / 2}) rotate(-90)`, "text-anchor": "middle" }, y.label),
  );
  const inOrder = [...points].sort((one, other) => one.frontier - other.frontier);
  for (const { low, high, [x.key]: at } of inOrder.filter(({ low: any }) => (any ?? null) !== null)) {
    svg.append(draw("line", { x1: toX(at), x2: toX(at), y1: toY(low), y2: toY(high), class: "whisker" }));
  }
  svg.append(...inOrder.map((point) => dot(point, toX(point[x.key]), toY(point[y.key]))));
  const named = points.length <= LABELLED ? inOrder : inOrder.filter(({ frontier }) => frontier);
  if (named.length <= LABELLED) {
    svg.append(...labels(named.map((point) => ({ name: point.name, x: toX(point[x.key]), y: toY(point[y.key]) }))));
  }
  return panel(`${y.label} against ${x.label}`, make("div", { class: "scatter" }, svg));
}

// The names, in lines, beside their points where there is room, and below one another.
function labels(points) {
  const free = { start: 0, end: 0 };
  return [...points]
    .sort((one, other) => one.y - other.y)
    .map(({ name, x, y }) => {
      const words = name.split(/ (?=\w+\.\w+=)| \| /);
      const wide = LETTER * Math.max(...words.map(({ length }) => length));
      const [anchor, left] = x + 9 + wide < BOX_WIDTH ? ["start", x + 9] : ["end", x - 9];
      const top = Math.max(y + 4, free[anchor]);
      free[anchor] = top + 12 * words.length;
      const label = draw("text", { y: top, "text-anchor": anchor, class: "name" });
      label.append(...words.map((word, at) => draw("tspan", { x: left, dy: at ? 12 : 0 }, word)));
      return label;
    });
}

function dot(point, cx, cy) {
  const look = point.frontier ? { r: 6, fill: PALETTE[5] } : { r: 4, fill: PALETTE[0] };
  const circle = draw("circle", { cx, cy, ...look, tabindex: "0", role: "img", "aria-label": point.name });
  const show = () => {
    const { left, top } = circle.getBoundingClientRect();
    showTooltip(point.said, left, top);
  };
  circle.addEventListener("pointerenter", show);
  circle.addEventListener("focus", show);
  circle.addEventListener("pointerleave", hideTooltip);
  circle.addEventListener("blur", hideTooltip);
  return circle;
}
