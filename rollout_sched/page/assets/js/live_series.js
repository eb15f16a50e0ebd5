// Levels of a live run over the last minutes, with a point for each received document.

import { make, panel, section } from "./dom.js";
import { count, percent } from "./format.js";
import { PALETTE } from "./palette.js";
import { lines } from "./plots.js";

const KEPT = 300;
const RATE_S = 10; // rates are over so many seconds: instances are polled each second
const NAMES = ["at", "inFlight", "waiting", "queued", "kv", "kvMost", "finished", "open"];
const COUNTERS = ["made", "idleS", "fleetS"];
const RATES = ["tokensPerS", "idle"];

const sum = (values) => values.reduce((all, value) => all + value, 0);

export class LiveSeries {
  constructor() {
    this.columns = Object.fromEntries([...NAMES, ...COUNTERS, ...RATES].map((name) => [name, []]));
    this.counted = new Map(); // tokens by instance, which counts from its own start
    this.made = 0;
  }

  take(state) {
    const { columns } = this;
    if (state.now < columns.at.at(-1)) Object.values(columns).forEach((column) => column.splice(0)); // restarted
    this.#push(NAMES, levelsNow(state));
    this.#push(COUNTERS, this.#counters(state));
    const { at, made, idleS, fleetS } = columns;
    const last = at.length - 1;
    const first = Math.max(0, Math.min(last - 1, at.findLastIndex((time) => time <= state.now - RATE_S)));
    const rate = (all, by) => (by[last] > by[first] ? (all[last] - all[first]) / (by[last] - by[first]) : null);
    this.#push(RATES, { tokensPerS: rate(made, at), idle: rate(idleS, fleetS) });
  }

  #counters({ instances, instance_s: seconds }) {
    for (const { url, generated_tokens: tokens } of instances) {
      if (tokens === null) continue;
      const before = this.counted.get(url) ?? tokens;
      this.made += tokens < before ? tokens : tokens - before;
      this.counted.set(url, tokens);
    }
    const fleetS = sum(Object.values(seconds));
    return { made: this.made, idleS: fleetS - (seconds.busy ?? 0), fleetS };
  }

  #push(names, point) {
    for (const name of names) {
      this.columns[name].push(point[name]);
      if (this.columns[name].length > KEPT) this.columns[name].shift();
    }
  }
}

function levelsNow({ now, requests, instances, step, prompts_per_step: wanted }) {
  const usages = instances.map(({ kv_usage }) => kv_usage).filter((usage) => usage !== null);
  return {
    at: now,
    inFlight: requests.in_flight,
    waiting: requests.waiting,
    queued: sum(instances.map(({ waiting }) => waiting ?? 0)),
    kv: usages.length ? sum(usages) / usages.length : null,
    kvMost: usages.length ? Math.max(...usages) : null,
    finished: step.finished,
    open: Math.max(0, wanted - step.in_batch - step.complete),
  };
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
  return lines(x, y, drawn, { height: 180, values: false });
}
