// The sections of a report other than the timelines.

import { legend, make, panel, section } from "./dom.js";
import { count, percent } from "./format.js";
import { PALETTE, colourOf } from "./palette.js";
import { bars, lines } from "./plots.js";

const MANY = 8; // with more steps than this, their curves get no separate colours
const CAUSES = {
  barrier: "waits for the rest of a batch, or the trainer",
  queue_empty: "nothing left to start",
  weight_update: "weights on their way",
  tool_wait: "tools at work",
  kv_stall: "KV memory short",
};
const evenly = (length) => Array.from({ length }, (_, at) => at / Math.max(1, length - 1));
const whole = (value) => (Number.isInteger(value) ? String(value) : "");
const share = { label: "share of the batch finished", form: (value) => `${Math.round(100 * value)} %` };

export function figuresSection(tables) {
  return section(
    "figures",
    "Figures",
    null,
    ...tables.map(({ title, columns, rows }) =>
      make(
        "details",
        {},
        make("summary", {}, title),
        figures(columns, rows),
        meanings(columns),
      ),
    ),
  );
}

export function meanings(columns) {
  return make(
    "dl",
    { class: "meanings" },
    ...columns.flatMap(({ label, means }) => [make("dt", {}, label), make("dd", {}, means)]),
  );
}

export function figures(columns, rows, first = "policy") {
  const head = [first, ...columns.map(({ label }) => label)].map((label) =>
    make("th", { scope: "col" }, label),
  );
  const body = rows.map(({ name, cells }) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, name),
      ...cells.map((cell) => make("td", {}, cell)),
    ),
  );
  return make(
    "div",
    { class: "scrolls", tabindex: "0", role: "region", "aria-label": `by ${first}` },
    make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body)),
  );
}

// -- the tail ------------------------------------------------------------------------------

export function tailSection(policies) {
  const most = Math.max(0, ...policies.flatMap(({ record }) => record.curves.flat()));
  const yScale = { range: () => [0, most * 1.05 || 1] };
  const parts = policies.filter(({ record }) => record.curves.length);
  if (!parts.length) return null;
  return section(
    "tail",
    "The tail",
    "Above: when the samples of a batch were finished, one line per step, counted from the first " +
      "dispatch of the step; the steeper at the right, the longer the tail. Below: the same by step.",
    make(
      "div",
      { class: "panels" },
      ...parts.map(({ name, record, steps }) =>
        panel(name, finishCurves(record.curves, yScale), tailBySteps(steps, yScale)),
      ),
    ),
  );
}

function finishCurves(curves, yScale) {
  const few = curves.length <= MANY;
  const drawn = curves.map((values, at) => ({
    label: `step ${at}`,
    values,
    colour: few ? colourOf(at) : `${PALETTE[0]}66`,
  }));
  const x = { ...share, values: evenly(curves[0].length) };
  const y = { label: "seconds", form: (value) => count(value) };
  return lines(x, y, drawn, { yScale, legend: few }).element;
}

function tailBySteps(steps, yScale) {
  const of = (key) => steps.map((step) => step[key]);
  const x = { label: "step", form: whole, values: steps.map((_, at) => at) };
  const points = steps.length === 1 ? { points: { show: true } } : {};
  return lines(
    x,
    { label: "seconds", form: (value) => count(value) },
    [
      { label: "half finished (t50)", values: of("t50_s"), colour: PALETTE[0], ...points },
      { label: "90 % (t90)", values: of("t90_s"), colour: PALETTE[1], dash: [6, 3], ...points },
      { label: "99 % (t99)", values: of("t99_s"), colour: PALETTE[5], dash: [2, 3], ...points },
    ],
    { yScale },
  ).element;
}

// -- bubbles -------------------------------------------------------------------------------

export function bubblesSection(policies) {
  return section(
    "bubbles",
    "Idle time and empty slots",
    "Share of the instances\u2019 time by cause. Idle: nothing was in flight on an instance. Empty slots: " +
      "of an even share of the batch.",
    legend(Object.entries(CAUSES).map(([cause, text], at) => [`${named(cause)}: ${text}`, colourOf(at)])),
    make(
      "div",
      { class: "scrolls", tabindex: "0", role: "region", "aria-label": "by policy" },
      make(
        "table",
        { class: "bubbles" },
        make(
          "thead",
          {},
          make("tr", {}, ...["policy", "idle", "", "empty slots", ""].map((text) => make("th", {}, text))),
        ),
        make(
          "tbody",
          {},
          ...policies.map(({ name, idle, vacant }) =>
            make("tr", {}, make("th", { scope: "row" }, name), ...stack(idle), ...stack(vacant)),
          ),
        ),
      ),
    ),
  );
}

const named = (cause) => cause.replaceAll("_", " ");

// The sum as text and its parts as a bar.
function stack(byCause) {
  const sum = Object.keys(CAUSES).reduce((all, cause) => all + (byCause[cause] ?? 0), 0);
  const said = Object.keys(CAUSES)
    .filter((cause) => byCause[cause] > 0)
    .map((cause) => `${named(cause)} ${percent(byCause[cause])}`)
    .join(", ");
  const bar = make("div", { class: "stack", role: "img", "aria-label": said, title: said });
  Object.keys(CAUSES).forEach((cause, at) => {
    const part = make("span");
    part.style.width = `${100 * (byCause[cause] ?? 0)}%`;
    part.style.background = colourOf(at);
    bar.append(part);
  });
  return [make("td", {}, percent(sum)), make("td", { class: "bar" }, bar)];
}

// -- what was trained ----------------------------------------------------------------------

export function stalenessSection(policies) {
  const most = Math.max(...policies.flatMap(({ staleness }) => Object.keys(staleness).map(Number)), 1);
  const versions = Array.from({ length: most + 1 }, (_, at) => at);
  const samples = Math.max(0, ...policies.flatMap(({ staleness }) => Object.values(staleness)));
  const yScale = { range: () => [0, samples * 1.05 || 1] };
  return section(
    "staleness",
    "Staleness",
    "How many versions the oldest token of a delivered sample was behind the trainer.",
    make(
      "div",
      { class: "panels" },
      ...policies.map(({ name, staleness }) =>
        panel(
          name,
          bars(
            { label: "versions", form: whole, values: versions },
            { label: "samples", form: count },
            versions.map((version) => staleness[version] ?? 0),
            PALETTE[0],
            { yScale },
          ).element,
        ),
      ),
    ),
  );
}

export function lengthsSection(policies, offered) {
  const parts = policies.filter(({ record }) => record.lengths.length);
  if (!parts.length) return null;
  const most = Math.max(...offered, ...parts.flatMap(({ record }) => record.lengths));
  const yScale = { range: () => [0, most * 1.05] };
  return section(
    "lengths",
    "Length bias",
    "Response lengths, shortest first: what was trained" +
      (offered.length
        ? ", and what was requested. A gap between them is a bias; at the right, a bias against long ones."
        : ". A journal does not record what was requested."),
    make(
      "div",
      { class: "panels" },
      ...parts.map(({ name, record }) => panel(name, lengths(record.lengths, offered, yScale))),
    ),
  );
}

function lengths(trained, offered, yScale) {
  const asked = { label: "requested", values: offered, colour: PALETTE[1], dash: [6, 3], width: 3 };
  const drawn = { label: "trained", values: trained, colour: PALETTE[0] };
  const x = { ...share, label: "share of the samples", values: evenly(trained.length) };
  const y = { label: "response tokens", form: count };
  return lines(x, y, offered.length ? [asked, drawn] : [drawn], { yScale }).element;
}

// -- the fleet in figures ------------------------------------------------------------------

export function levelsSection(policies, shared) {
  const moved = [];
  const requests = policies.flatMap(({ record: { fleet } }) => [...fleet.in_flight, ...fleet.waiting, ...fleet.queued]);
  const most = requests.reduce((one, other) => Math.max(one, other), 1);
  const element = section(
    "levels",
    "KV memory and queues over time",
    "In flight: attempts on instances. Waiting: for an instance. Queued: inside the instances, as " +
      "they report it. KV: share of the cache in use, over the fleet and of its fullest instance.",
    make(
      "div",
      { class: "panels" },
      ...policies.map(({ name, record }) => {
        const [load, kv] = levels(record.fleet, shared, most);
        moved.push(load.plot, kv.plot);
        return panel(name, load.element, kv.element);
      }),
    ),
  );
  const follow = ({ from, to }) =>
    moved.forEach((plot) => plot.setScale("x", { min: from, max: to }));
  shared.watch(follow);
  follow(shared);
  return element;
}

function levels(fleet, shared, most) {
  const x = {
    label: "seconds",
    form: (value) => String(Number(value.toPrecision(6))),
    values: fleet.in_flight.map((_, at) => at * fleet.width_s),
  };
  const hooks = { setSelect: [(plot) => followSelection(plot, shared)] };
  const options = { cursor: { drag: { x: true, y: false, setScale: false } }, hooks };
  const load = lines(
    x,
    { label: "requests", form: count },
    [
      { label: "in flight", values: fleet.in_flight, colour: PALETTE[0] },
      { label: "waiting", values: fleet.waiting, colour: PALETTE[1], dash: [6, 3] },
      { label: "queued", values: fleet.queued, colour: PALETTE[5], dash: [2, 3] },
    ],
    { ...options, yScale: { range: () => [0, most * 1.05] } },
  );
  const kv = lines(
    x,
    { label: "KV in use", form: (value) => `${Math.round(100 * value)} %` },
    [
      { label: "fleet", values: fleet.kv, colour: PALETTE[2] },
      { label: "fullest", values: fleet.kv_most, colour: PALETTE[3], dash: [6, 3] },
    ],
    { ...options, yScale: { range: () => [0, 1] } },
  );
  return [load, kv];
}

function followSelection(plot, shared) {
  const { left, width } = plot.select;
  if (width < 4) return;
  shared.show(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
  plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
}

