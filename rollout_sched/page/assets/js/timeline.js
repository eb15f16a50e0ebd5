// The fleet over time on a canvas: a row for each instance, with a line for each of its places.

import { hideTooltip, make, showTooltip } from "./dom.js";
import { seconds } from "./format.js";
import { Lanes } from "./lanes.js";
import { AXIS, Painter } from "./painter.js";
import { onTheme } from "./palette.js";
import { described, nameOf } from "./request.js";

const LEAST_ROW = 14;
const HELP =
  "Arrow keys pan and scroll, plus and minus zoom, 0 shows all, N and P select the next and the previous " +
  "request on a slot, O shows one instance alone, Escape clears the selection.";

// Colour modes: each maps a span to the number that selects its colour.
const COLOURINGS = {
  version: (record, span) => record.spans.version[span],
  outcome: (record, span) => record.attempts.outcome[record.spans.attempt[span]],
  "cause of waiting": (record, span) => record.attempts.cause[record.spans.attempt[span]],
};

export class Timeline {
  // `select` is called with the facts of the selected span, or null.
  constructor(name, record, shared, words, select) {
    this.record = record;
    this.shared = shared;
    this.words = words;
    this.select = select;
    this.lanes = new Lanes(record);
    this.scroll = 0;
    this.alone = -1; // the instance that is shown alone
    this.chosen = -1;
    this.colouring = COLOURINGS.version;
    this.canvas = make("canvas", {
      class: "timeline",
      tabindex: "0",
      role: "application",
      "aria-label": `${name}: ${record.instances.length} instances over time. ${HELP}`,
      "data-spans": record.spans.start.length,
    });
    this.painter = new Painter(this);
    shared.watch(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    onTheme(() => this.draw());
  }

  colourBy(name) {
    this.colouring = COLOURINGS[name];
    this.draw();
  }

  // Replaces the record with a longer one; the selection stays.
  replace(record) {
    const chosen = this.chosen < 0 ? null : this.numberOf(this.chosen);
    this.record = record;
    this.lanes = new Lanes(record);
    this.chosen = chosen === null ? -1 : record.spans.attempt.findIndex((_, span) => this.numberOf(span) === chosen);
    this.canvas.dataset.spans = record.spans.start.length;
    this.draw();
  }

  // The attempt's number, which stays the same in a growing record.
  numberOf(span) {
    return this.record.attempts.number[this.record.spans.attempt[span]];
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.painter.paint());
  }

  // -- layout ----------------------------------------------------------------------------

  layout() {
    const width = this.canvas.clientWidth;
    const height = this.canvas.clientHeight;
    const left = Math.min(110, Math.round(width / 4));
    const instances = this.alone < 0 ? [...this.record.instances.keys()] : [this.alone];
    const row = Math.max(LEAST_ROW, Math.floor((height - AXIS) / Math.max(1, instances.length)));
    const most = Math.max(0, row * instances.length - (height - AXIS));
    this.scroll = Math.max(0, Math.min(this.scroll, most));
    const perSecond = (width - left) / (this.shared.to - this.shared.from);
    return { width, height, left, instances, row, perSecond };
  }

  x(time, { left, perSecond }) {
    return left + (time - this.shared.from) * perSecond;
  }

  timeAt(x, { left, perSecond } = this.layout()) {
    return this.shared.from + (x - left) / perSecond;
  }

  // The span at a point of the canvas; -1 for none.
  spanAt(x, y) {
    const layout = this.layout();
    const place = Math.floor((y - AXIS + this.scroll) / layout.row);
    if (x < layout.left || y < AXIS || place >= layout.instances.length) return -1;
    const instance = layout.instances[place];
    const within = y - AXIS + this.scroll - place * layout.row;
    const { places, lines, high } = this.linesOf(instance, layout);
    const near = 3 / layout.perSecond;
    for (const off of [0, 1, -1, 2, -2]) {
      const line = Math.floor(within / high) + off;
      if (line < 0 || line >= lines) continue;
      const lane = this.lanes.firstOf[instance] + Math.floor((line * places) / lines);
      const span = this.lanes.at(lane, this.timeAt(x, layout) - near, 2 * near);
      if (span >= 0) return span;
    }
    return -1;
  }

  // With more places than pixels, one place in several represents its neighbours.
  linesOf(instance, layout) {
    const places = this.lanes.placesOf[instance];
    const lines = Math.min(places, layout.row - 2);
    return { places, lines, high: (layout.row - 2) / lines };
  }

  // -- selection -------------------------------------------------------------------------

  choose(span) {
    this.chosen = span;
    this.select(span < 0 ? null : described(this.record, span, this.words));
    this.draw();
  }

  // Finds and shows the first span of the request or group with that name.
  find(name) {
    const { attempts, spans, groups, requests } = this.record;
    for (let span = 0; span < spans.start.length; span++) {
      const request = attempts.request[spans.attempt[span]];
      if (groups[requests.group[request]] !== name && nameOf(this.record, request) !== name) continue;
      const room = Math.max(spans.length[span] / 2, (this.shared.to - this.shared.from) / 20);
      this.shared.show(spans.start[span] - room, this.lanes.endOf(span) + room);
      this.choose(span);
      return true;
    }
    return false;
  }

  // Without a selection it starts with the span at the start of the view.
  chooseBeside(step) {
    if (this.chosen >= 0) return this.choose(this.lanes.beside(this.chosen, step));
    const first = this.lanes.firstOf[this.layout().instances[0]];
    const place = this.lanes.firstAfter(first, this.shared.from);
    if (place < this.lanes.begins[first + 1]) this.choose(this.lanes.order[place]);
    return undefined;
  }

  showAlone(instance) {
    if (instance >= this.record.instances.length) return;
    this.alone = this.alone === instance ? -1 : instance;
    this.scroll = 0;
    this.draw();
  }

  toggleAlone() {
    const { attempts, spans } = this.record;
    const chosen = this.chosen < 0 ? 0 : attempts.instance[spans.attempt[this.chosen]];
    this.showAlone(this.alone < 0 ? chosen : this.alone);
  }

  hover(x, y, at) {
    const span = this.spanAt(x, y);
    if (span < 0) return this.hoverMark(x, at);
    const lines = described(this.record, span, this.words).map(([label, text]) => `${label}: ${text}`);
    return showTooltip(lines, at.clientX, at.clientY);
  }

  hoverMark(x, at) {
    const layout = this.layout();
    const near = this.record.marks.find(([time]) => Math.abs(this.x(time, layout) - x) < 3);
    if (near === undefined) return hideTooltip();
    const [time, kind, what] = near;
    const zero = this.record.zero ?? 0;
    return showTooltip([`${seconds(time - zero)}: ${what}`], at.clientX, at.clientY);
  }
}
