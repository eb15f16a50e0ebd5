// Handles mouse, touch and keys on a timeline.

import { hideTooltip } from "./dom.js";
import { AXIS } from "./painter.js";

const STEP = 1.3; // zoom factor of one key press
const MOVED = 4; // pixels from which a press counts as a drag

const KEYS = {
  ArrowLeft: (timeline) => panBy(timeline, -0.1),
  ArrowRight: (timeline) => panBy(timeline, 0.1),
  ArrowUp: (timeline) => scrollBy(timeline, -40),
  ArrowDown: (timeline) => scrollBy(timeline, 40),
  "+": ({ shared }) => shared.zoom(STEP),
  "=": ({ shared }) => shared.zoom(STEP),
  "-": ({ shared }) => shared.zoom(1 / STEP),
  0: ({ shared }) => shared.all(),
  Home: ({ shared }) => shared.all(),
  n: (timeline) => timeline.chooseBeside(1),
  p: (timeline) => timeline.chooseBeside(-1),
  o: (timeline) => timeline.toggleAlone(),
  Escape: (timeline) => timeline.choose(-1),
};

function panBy({ shared }, share) {
  shared.pan(share * (shared.to - shared.from));
}

function scrollBy(timeline, pixels) {
  timeline.scroll += pixels;
  timeline.draw();
}

export function listen(timeline) {
  const { canvas, shared } = timeline;
  canvas.addEventListener("keydown", (event) => {
    const act = KEYS[event.key] ?? KEYS[event.key.toLowerCase()];
    if (act === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act(timeline);
  });
  canvas.addEventListener(
    "wheel",
    (event) => {
      // The wheel scrolls the page; it zooms with Ctrl or Meta, or when the drawing has the focus.
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return;
      event.preventDefault();
      if (event.shiftKey) scrollBy(timeline, event.deltaY || event.deltaX);
      else shared.zoom(Math.exp(-event.deltaY / 400), timeline.timeAt(event.offsetX));
    },
    { passive: false },
  );
  canvas.addEventListener("pointerleave", hideTooltip);
  drag(timeline);
}

// One pointer pans and scrolls, or selects if it does not move; two pointers zoom.
function drag(timeline) {
  const { canvas, shared } = timeline;
  const down = new Map();
  let moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    canvas.focus();
    down.set(event.pointerId, event);
    moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = down.get(event.pointerId);
    if (before === undefined) return timeline.hover(event.offsetX, event.offsetY, event);
    moved += Math.abs(event.offsetX - before.offsetX) + Math.abs(event.offsetY - before.offsetY);
    if (down.size === 2) pinch(timeline, down, event);
    else if (moved > MOVED) {
      hideTooltip();
      shared.pan(timeline.timeAt(before.offsetX) - timeline.timeAt(event.offsetX));
      scrollBy(timeline, before.offsetY - event.offsetY);
    }
    return down.set(event.pointerId, event);
  });
  canvas.addEventListener("pointerup", (event) => {
    down.delete(event.pointerId);
    if (moved <= MOVED) press(timeline, event);
  });
  canvas.addEventListener("pointercancel", (event) => down.delete(event.pointerId));
}

function press(timeline, { offsetX, offsetY }) {
  const layout = timeline.layout();
  if (offsetX >= layout.left) return timeline.choose(timeline.spanAt(offsetX, offsetY));
  const place = Math.floor((offsetY + timeline.scroll - AXIS) / layout.row);
  if (place >= 0 && place < layout.instances.length) timeline.showAlone(layout.instances[place]);
  return undefined;
}

function pinch(timeline, down, event) {
  const [other] = [...down.values()].filter((each) => each.pointerId !== event.pointerId);
  const before = Math.abs(down.get(event.pointerId).offsetX - other.offsetX);
  const after = Math.abs(event.offsetX - other.offsetX);
  if (before > MOVED && after > MOVED) {
    timeline.shared.zoom(after / before, timeline.timeAt((event.offsetX + other.offsetX) / 2));
  }
}
