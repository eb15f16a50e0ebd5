// The timelines of all policies, stacked or side by side, on one time axis.

import { legend, make, panel, section } from "./dom.js";
import { listen } from "./gestures.js";
import { PALETTE, WARNING, colourOf } from "./palette.js";
import { Timeline } from "./timeline.js";
import { TimeWindow } from "./window.js";

const ABOUT =
  "Each row is an instance, each line in it one of its slots, each bar the tokens that an attempt made " +
  "under one version. Click a bar to see its request, a name to see that instance alone. Drag to pan; " +
  "zoom with Ctrl and the wheel, two fingers, or keys (Tab selects a drawing).";

export function fleetSection(policies, words, note) {
  const shared = new TimeWindow(Math.max(...policies.map(({ record }) => record.end_s)));
  const timelines = policies.map(({ name, record }) => withDetails(name, record, shared, words));
  const drawn = timelines.map(({ timeline }) => timeline);
  const legendBox = make("div");
  const colour = (name) => {
    drawn.forEach((each) => each.colourBy(name));
    legendBox.replaceChildren(legend(legendOf(name, words)));
  };
  colour("version");
  const element = section(
    "fleet",
    "The fleet over time",
    ABOUT + (note ? ` ${note}` : ""),
    controls(shared, drawn, colour),
    legendBox,
    make("div", { class: "panels wide" }, ...timelines.map(({ element: each }) => each)),
  );
  return { element, shared, timelines: drawn };
}

function withDetails(name, record, shared, words) {
  const details = make("dl", { class: "details", "aria-live": "polite" });
  const timeline = new Timeline(name, record, shared, words, (said) => {
    const rows = said ?? [];
    details.replaceChildren(
      ...rows.flatMap(([label, text]) => [make("dt", {}, label), make("dd", {}, text)]),
    );
  });
  listen(timeline);
  return { timeline, element: panel(name, timeline.canvas, details) };
}

function controls(shared, timelines, colour) {
  const found = make("output");
  const find = make("input", { type: "search", placeholder: "request or group", "aria-label": "find" });
  find.addEventListener("change", () => {
    const any = timelines.map((each) => each.find(find.value.trim())).some(Boolean);
    found.textContent = any || !find.value ? "" : "no request or group of that name ran";
  });
  const pick = make(
    "select",
    { onchange: (event) => colour(event.target.value) },
    ...["version", "outcome", "cause of waiting"].map((name) => make("option", {}, name)),
  );
  const button = (label, title, onclick) =>
    make("button", { type: "button", title, "aria-label": title, onclick }, label);
  return make(
    "div",
    { class: "controls" },
    button("+", "zoom in", () => shared.zoom(1.5)),
    button("\u2212", "zoom out", () => shared.zoom(1 / 1.5)),
    button("\u25c0", "earlier", () => shared.pan((shared.from - shared.to) / 4)),
    button("\u25b6", "later", () => shared.pan((shared.to - shared.from) / 4)),
    button("all", "show all of the time", () => shared.all()),
    make("label", {}, "colour by ", pick),
    make("label", {}, "find ", find),
    found,
  );
}

function legendOf(name, words) {
  if (name === "outcome") return words.outcomes.map((outcome, at) => [outcome, colourOf(at)]);
  if (name !== "version") return words.causes.map((cause, at) => [cause, colourOf(at)]);
  const versions = PALETTE.map((colour, at) => [`${at}, ${at + PALETTE.length}, \u2026`, colour]);
  versions[0][0] = `version ${versions[0][0]}`;
  return [
    ...versions,
    ["lines: a batch; dotted: new weights", "var(--text)"],
    ["an instance or the scheduler was lost", WARNING],
  ];
}
