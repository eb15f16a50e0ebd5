// Levels of a live run over the last minutes, with a point for each received document.

import { make, panel, section } from "./dom.js";
import { count, percent } from "./format.js";
import { PALETTE } from "./palette.js";
import { lines } from "./plots.js";

const KEPT = 300;

export class LiveSeries {
  constructor() {
    this.columns = { at: [], inFlight: [], waiting: [], queued: [], kv: [], kvMost: [], finished: [] };
  }

  take({ now, requests, instances, step }) {
    const usages = instances.map(({ kv_usage }) => kv_usage).filter((usage) => usage !== null);
    const sum = (values) => values.reduce((all, value) => all + value, 0);
    const point = {
      at: now,
      inFlight: requests.in_flight,
      waiting: requests.waiting,
      queued: sum(instances.map(({ waiting }) => waiting ?? 0)),
      kv: usages.length ? sum(usages) / usages.length : null,
      kvMost: usages.length ? Math.max(...usages) : null,
      finished: step.finished,
    };
    for (const [name, column] of Object.entries(this.columns)) {
      column.push(point[name]);
      if (column.length > KEPT) column.shift();
    }
  }
}

export function seriesSection({ columns }) {
  const x = { label: "seconds", form: (value) => String(Math.round(value)), values: columns.at };
  const drawn = [
    [
      "requests",
      { label: "requests", form: count },
      [
        ["in flight", "inFlight", PALETTE[0], []],
        ["waiting", "waiting", PALETTE[1], [6, 3]],
        ["queued", "queued", PALETTE[5], [2, 3]],
      ],
    ],
    [
      "KV memory",
      { label: "KV in use", form: percent },
      [
        ["fleet", "kv", PALETTE[2], []],
        ["fullest", "kvMost", PALETTE[3], [6, 3]],
      ],
    ],
    ["this step", { label: "samples ended", form: count }, [["samples", "finished", PALETTE[0], []]]],
  ].map(([title, y, series]) => ({ title, keys: series.map(([, key]) => key), ...drawing(x, y, series, columns) }));
  return {
    element: section(
      "levels",
      "Load, KV memory and the step over time",
      null,
      make("div", { class: "panels" }, ...drawn.map(({ title, element }) => panel(title, element))),
    ),
    update: () =>
      drawn.forEach(({ plot, keys }) =>
        plot.setData([columns.at, ...keys.map((key) => columns[key])]),
      ),
  };
}

function drawing(x, y, series, columns) {
  const drawn = series.map(([label, key, colour, dash]) => ({ label, values: columns[key], colour, dash }));
  return lines(x, y, drawn, { height: 180 });
}
