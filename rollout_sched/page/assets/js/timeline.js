// The fleet over time on a canvas: a row for each instance, a line in it for each of its places.

import { hideTooltip, make, showTooltip } from "./dom.js";
import { Lanes } from "./lanes.js";
import { WARNING, colourOf, onTheme, themed } from "./palette.js";
import { described, nameOf } from "./request.js";
import { seconds } from "./format.js";
import { ticks } from "./ticks.js";

const AXIS = 20; // pixels above the rows, for the times
const LEAST_ROW = 14;
const FOR_A_NAME = 46; // pixels that a span has to have before its request is written on it
const HELP =
  "Arrow keys pan and scroll, plus and minus zoom, 0 shows all, N and P go from request to request " +
  "on a place, O shows one instance alone, Escape lets go.";

// How spans are coloured: what of a span counts, as a number.
const COLOURINGS = {
  version: (record, span) => record.spans.version[span],
  outcome: (record, span) => record.attempts.outcome[record.spans.attempt[span]],
  "cause of waiting": (record, span) => record.attempts.cause[record.spans.attempt[span]],
};

export class Timeline {
  // `select` is called with what is known of a span that was chosen, or null.
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
    this.context = this.canvas.getContext("2d");
    shared.watch(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    onTheme(() => this.draw());
  }

  colourBy(name) {
    this.colouring = COLOURINGS[name];
    this.draw();
  }

  // The record has grown; what was chosen stays so.
  replace(record) {
    const chosen = this.chosen < 0 ? null : this.numberOf(this.chosen);
    this.record = record;
    this.lanes = new Lanes(record);
    this.chosen = chosen === null ? -1 : record.spans.attempt.findIndex((_, span) => this.numberOf(span) === chosen);
    this.canvas.dataset.spans = record.spans.start.length;
    this.draw();
  }

  // Of the attempt, in a record that grows.
  numberOf(span) {
    return this.record.attempts.number[this.record.spans.attempt[span]];
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.drawNow());
  }

  // -- where things are ------------------------------------------------------------------

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

  // The span under a point of the canvas; -1 for none.
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

  // Where there are more places than pixels, every so-manieth place stands for its neighbours.
  linesOf(instance, layout) {
    const places = this.lanes.placesOf[instance];
    const lines = Math.min(places, layout.row - 2);
    return { places, lines, high: (layout.row - 2) / lines };
  }

  // -- drawing ---------------------------------------------------------------------------

  drawNow() {
    const layout = this.layout();
    if (!layout.width) return;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(layout.width * ratio);
    this.canvas.height = Math.round(layout.height * ratio);
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.font = "11px system-ui, sans-serif";
    this.drawn = 0;
    this.drawRows(layout);
    this.drawChosen(layout);
    this.drawAxis(layout);
    this.drawMarks(layout);
    Object.assign(this.canvas.dataset, {
      drawn: this.drawn,
      from: this.shared.from.toFixed(3),
      to: this.shared.to.toFixed(3),
    });
  }

  drawRows(layout) {
    const { context } = this;
    context.save();
    context.beginPath();
    context.rect(0, AXIS, layout.width, layout.height - AXIS);
    context.clip();
    layout.instances.forEach((instance, place) => {
      const top = AXIS + place * layout.row - this.scroll;
      if (top + layout.row < AXIS || top > layout.height) return;
      context.fillStyle = themed("row");
      context.fillRect(layout.left, top, layout.width - layout.left, layout.row - 2);
      this.drawInstance(instance, top, layout);
      this.drawName(this.record.instances[instance], top, layout);
    });
    context.restore();
  }

  drawInstance(instance, top, layout) {
    const { places, lines, high } = this.linesOf(instance, layout);
    for (let line = 0; line < lines; line++) {
      const lane = this.lanes.firstOf[instance] + Math.floor((line * places) / lines);
      this.drawLane(lane, top + line * high, high > 3 ? high - 1 : high, layout);
    }
  }

  drawLane(lane, y, high, layout) {
    const { spans } = this.record;
    const { order, begins } = this.lanes;
    const last = begins[lane + 1];
    let at = this.lanes.firstAfter(lane, this.shared.from);
    while (at < last && spans.start[order[at]] < this.shared.to) {
      const span = order[at];
      const from = Math.max(layout.left, this.x(spans.start[span], layout));
      const to = Math.min(layout.width, this.x(this.lanes.endOf(span), layout));
      this.context.fillStyle = colourOf(this.colouring(this.record, span));
      this.context.fillRect(from, y, Math.max(0.7, to - from), high);
      this.drawn++;
      if (high >= 11 && to - from > FOR_A_NAME) this.drawRequest(span, from, to, y, high);
      // What ends within this pixel would be drawn over it.
      at = to - from < 1 ? this.lanes.firstAfter(lane, this.timeAt(from + 1, layout), at + 1) : at + 1;
    }
  }

  drawRequest(span, from, to, y, high) {
    const { context, record } = this;
    const name = nameOf(record, record.attempts.request[record.spans.attempt[span]]);
    context.save();
    context.beginPath();
    context.rect(from, y, to - from - 2, high);
    context.clip();
    context.fillStyle = "#000";
    context.textBaseline = "middle";
    context.fillText(name, from + 3, y + high / 2 + 0.5);
    context.restore();
  }

  drawName(name, top, layout) {
    const { context } = this;
    context.fillStyle = themed("text");
    context.textBaseline = "middle";
    context.save();
    context.beginPath();
    context.rect(0, top, layout.left - 4, layout.row);
    context.clip();
    context.fillText(short(name), 2, top + Math.min(layout.row / 2, 30));
    context.restore();
  }

  // Where the request that was chosen ran, before and after too.
  drawChosen(layout) {
    if (this.chosen < 0) return;
    const { attempts, spans } = this.record;
    const request = attempts.request[spans.attempt[this.chosen]];
    this.context.strokeStyle = themed("text");
    for (let span = 0; span < spans.start.length; span++) {
      if (attempts.request[spans.attempt[span]] !== request) continue;
      const box = this.boxOf(span, layout);
      if (box === null) continue;
      this.context.lineWidth = span === this.chosen ? 2 : 1;
      this.context.strokeRect(box.x, box.y, box.width, box.height);
    }
  }

  boxOf(span, layout) {
    const instance = this.record.attempts.instance[this.record.spans.attempt[span]];
    const row = layout.instances.indexOf(instance);
    const from = Math.max(layout.left, this.x(this.record.spans.start[span], layout));
    const to = Math.min(layout.width, this.x(this.lanes.endOf(span), layout));
    if (row < 0 || to < from) return null;
    const high = (layout.row - 2) / this.lanes.placesOf[instance];
    const place = this.lanes.laneOf(span) - this.lanes.firstOf[instance];
    const y = AXIS + row * layout.row - this.scroll + place * high;
    if (y < AXIS) return null;
    return { x: from, y: y - 1, width: Math.max(3, to - from), height: Math.max(4, high) };
  }

  drawAxis(layout) {
    const { context } = this;
    context.fillStyle = themed("surface");
    context.fillRect(0, 0, layout.width, AXIS);
    context.fillStyle = themed("text");
    context.textBaseline = "middle";
    context.fillText("seconds", 2, AXIS / 2);
    const room = (layout.width - layout.left) / 70;
    const zero = this.record.zero ?? 0; // where times are told from
    for (const { at, label } of ticks(this.shared.from - zero, this.shared.to - zero, room)) {
      const x = this.x(at + zero, layout);
      context.fillStyle = themed("grid");
      context.fillRect(x, AXIS - 4, 1, layout.height);
      context.fillStyle = themed("text");
      if (x + context.measureText(label).width + 3 < layout.width) {
        context.fillText(label, x + 3, AXIS / 2);
      }
    }
  }

  drawMarks(layout) {
    const { context } = this;
    for (const [at, kind] of this.record.marks) {
      if (at < this.shared.from || at > this.shared.to) continue;
      const trouble = kind === "lost" || kind === "restarted";
      context.strokeStyle = trouble ? WARNING : themed("text");
      context.globalAlpha = trouble ? 1 : 0.55;
      context.setLineDash(kind === "published" ? [2, 3] : []);
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(this.x(at, layout), AXIS);
      context.lineTo(this.x(at, layout), layout.height);
      context.stroke();
    }
    context.setLineDash([]);
    context.globalAlpha = 1;
  }

  // -- what is chosen --------------------------------------------------------------------

  choose(span) {
    this.chosen = span;
    this.select(span < 0 ? null : described(this.record, span, this.words));
    this.draw();
  }

  // The first span of a request of that name, or of a group; it is shown, too.
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

  // The one at the start of the view, where none is chosen.
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

// The end of a URL says more than its beginning.
function short(name) {
  const bare = name.replace(/^https?:\/\//, "");
  return bare.length > 18 ? `\u2026${bare.slice(-17)}` : bare;
}
