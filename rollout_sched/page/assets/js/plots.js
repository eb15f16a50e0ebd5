// Line and bar charts with uPlot, in the colours of the page.

import { make } from "./dom.js";
import { onTheme, themed } from "./palette.js";

const HEIGHT = 200;
const plots = new Set();

onTheme(() => plots.forEach((plot) => plot.redraw()));

function axis(label, form, extra = {}) {
  return {
    label,
    labelSize: 18,
    labelFont: "12px system-ui, sans-serif",
    font: "11px system-ui, sans-serif",
    stroke: () => themed("text"),
    grid: { stroke: () => themed("grid"), width: 1 },
    ticks: { stroke: () => themed("grid"), width: 1 },
    ...(form === null ? {} : { values: (_, values) => values.map((value) => form(value)) }),
    ...extra,
  };
}

// `x`: {label, form, values}; `y`: {label, form}; `lines`: [{label, values, colour, ...}].
export function lines(x, y, lines_, options = {}) {
  const box = make("div", { class: "plot", role: "img", "aria-label": `${y.label} over ${x.label}` });
  const settings = {
    width: 320,
    height: options.height ?? HEIGHT,
    scales: { x: { time: false, ...options.xScale }, y: { range: fromZero, ...options.yScale } },
    axes: [axis(x.label, x.form), axis(y.label, y.form, { size: 58 })],
    cursor: { drag: { x: true, y: false }, ...options.cursor },
    legend: { show: options.legend ?? true, live: options.values ?? true },
    series: [
      { label: x.label, value: (_, value) => (value === null ? "" : x.form(value)) },
      ...lines_.map(({ label, colour, values: _, ...more }) => ({
        label,
        stroke: colour,
        width: 1.5,
        points: { show: false },
        value: (_plot, value) => (value === null || value === undefined ? "" : y.form(value)),
        ...more,
      })),
    ],
    hooks: options.hooks ?? {},
  };
  const plot = new uPlot(settings, [x.values, ...lines_.map(({ values }) => values)], box);
  fit(plot, box);
  return { element: box, plot };
}

export function bars(x, y, values, colour, options = {}) {
  return lines(
    x,
    y,
    [{ label: y.label, values, colour, fill: colour, paths: uPlot.paths.bars({ size: [0.7, 60] }) }],
    {
      ...options,
      legend: false,
      xScale: { range: (_, least, most) => [least - 0.6, most + 0.6] },
    },
  );
}

const fromZero = (_, least, most) => [Math.min(0, least ?? 0), most > 0 ? most * 1.05 : 1];

function fit(plot, box) {
  plots.add(plot);
  new ResizeObserver(() => {
    const width = box.clientWidth;
    if (width && Math.abs(width - plot.width) > 1) plot.setSize({ width, height: plot.height });
  }).observe(box);
}
