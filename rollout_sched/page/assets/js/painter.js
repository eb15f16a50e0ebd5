// Paints a timeline (timeline.js) on its canvas.

import { WARNING, colourOf, themed } from "./palette.js";
import { nameOf } from "./request.js";
import { ticks } from "./ticks.js";

export const AXIS = 20; // pixels above the rows for the time axis
const FOR_A_NAME = 46; // least width in pixels of a span that shows its request's name

export class Painter {
  // `drawn`: the number of bars in the last painting.
  constructor(timeline) {
    this.timeline = timeline;
    this.context = timeline.canvas.getContext("2d");
    this.drawn = 0;
  }

  paint() {
    const layout = this.timeline.layout();
    if (!layout.width) return;
    const ratio = devicePixelRatio || 1;
    this.timeline.canvas.width = Math.round(layout.width * ratio);
    this.timeline.canvas.height = Math.round(layout.height * ratio);
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.font = "11px system-ui, sans-serif";
    this.drawn = 0;
    this.drawRows(layout);
    this.drawChosen(layout);
    this.drawAxis(layout);
    this.drawMarks(layout);
    Object.assign(this.timeline.canvas.dataset, {
      drawn: this.drawn,
      from: this.timeline.shared.from.toFixed(3),
      to: this.timeline.shared.to.toFixed(3),
    });
  }

  drawRows(layout) {
    const { context } = this;
    context.save();
    context.beginPath();
    context.rect(0, AXIS, layout.width, layout.height - AXIS);
    context.clip();
    layout.instances.forEach((instance, place) => {
      const top = AXIS + place * layout.row - this.timeline.scroll;
      if (top + layout.row < AXIS || top > layout.height) return;
      context.fillStyle = themed("row");
      context.fillRect(layout.left, top, layout.width - layout.left, layout.row - 2);
      this.drawInstance(instance, top, layout);
      this.drawName(this.timeline.record.instances[instance], top, layout);
    });
    context.restore();
  }

  drawInstance(instance, top, layout) {
    const { places, lines, high } = this.timeline.linesOf(instance, layout);
    for (let line = 0; line < lines; line++) {
      const lane = this.timeline.lanes.firstOf[instance] + Math.floor((line * places) / lines);
      this.drawLane(lane, top + line * high, high > 3 ? high - 1 : high, layout);
    }
  }

  drawLane(lane, y, high, layout) {
    const { spans } = this.timeline.record;
    const { order, begins } = this.timeline.lanes;
    const last = begins[lane + 1];
    let at = this.timeline.lanes.firstAfter(lane, this.timeline.shared.from);
    while (at < last && spans.start[order[at]] < this.timeline.shared.to) {
      const span = order[at];
      const from = Math.max(layout.left, this.timeline.x(spans.start[span], layout));
      const to = Math.min(layout.width, this.timeline.x(this.timeline.lanes.endOf(span), layout));
      this.context.fillStyle = colourOf(this.timeline.colouring(this.timeline.record, span));
      this.context.fillRect(from, y, Math.max(0.7, to - from), high);
      this.drawn++;
      if (high >= 11 && to - from > FOR_A_NAME) this.drawRequest(span, from, to, y, high);
      // Skip the spans that end within this pixel: they would be drawn over it.
      at = to - from < 1 ? this.timeline.lanes.firstAfter(lane, this.timeline.timeAt(from + 1, layout), at + 1) : at + 1;
    }
  }

  drawRequest(span, from, to, y, high) {
    const { context } = this;
    const { record } = this.timeline;
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

  // Marks all spans of the selected request.
  drawChosen(layout) {
    if (this.timeline.chosen < 0) return;
    const { attempts, spans } = this.timeline.record;
    const request = attempts.request[spans.attempt[this.timeline.chosen]];
    this.context.strokeStyle = themed("text");
    for (let span = 0; span < spans.start.length; span++) {
      if (attempts.request[spans.attempt[span]] !== request) continue;
      const box = this.boxOf(span, layout);
      if (box === null) continue;
      this.context.lineWidth = span === this.timeline.chosen ? 2 : 1;
      this.context.strokeRect(box.x, box.y, box.width, box.height);
    }
  }

  boxOf(span, layout) {
    const instance = this.timeline.record.attempts.instance[this.timeline.record.spans.attempt[span]];
    const row = layout.instances.indexOf(instance);
    const from = Math.max(layout.left, this.timeline.x(this.timeline.record.spans.start[span], layout));
    const to = Math.min(layout.width, this.timeline.x(this.timeline.lanes.endOf(span), layout));
    if (row < 0 || to < from) return null;
    const high = (layout.row - 2) / this.timeline.lanes.placesOf[instance];
    const place = this.timeline.lanes.laneOf(span) - this.timeline.lanes.firstOf[instance];
    const y = AXIS + row * layout.row - this.timeline.scroll + place * high;
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
    const zero = this.timeline.record.zero ?? 0; // the origin of the shown times
    for (const { at, label } of ticks(this.timeline.shared.from - zero, this.timeline.shared.to - zero, room)) {
      const x = this.timeline.x(at + zero, layout);
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
    for (const [at, kind] of this.timeline.record.marks) {
      if (at < this.timeline.shared.from || at > this.timeline.shared.to) continue;
      const trouble = kind === "lost" || kind === "restarted";
      context.strokeStyle = trouble ? WARNING : themed("text");
      context.globalAlpha = trouble ? 1 : 0.55;
      context.setLineDash(kind === "published" ? [2, 3] : []);
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(this.timeline.x(at, layout), AXIS);
      context.lineTo(this.timeline.x(at, layout), layout.height);
      context.stroke();
    }
    context.setLineDash([]);
    context.globalAlpha = 1;
  }
}

// Keeps the end of a URL, which tells more than its start.
function short(name) {
  const bare = name.replace(/^https?:\/\//, "");
  return bare.length > 18 ? `\u2026${bare.slice(-17)}` : bare;
}
