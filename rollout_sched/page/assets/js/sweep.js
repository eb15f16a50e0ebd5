// The page of a sweep: the table and the Pareto frontier in plots.

import { heading, legend, make, section } from "./dom.js";
import { count } from "./format.js";
import { unpacked } from "./packed.js";
import { PALETTE } from "./palette.js";
import { scatter } from "./scatter.js";
import { figures } from "./sections.js";

async function start() {
  const data = await unpacked(document.getElementById("data").textContent);
  document.getElementById("page").replaceChildren(
    heading(data),
    frontierSection(data),
    section("figures", "Figures", "The fastest first; * marks the Pareto frontier.", table(data), meanings(data.columns)),
  );
  requestAnimationFrame(() => setTimeout(() => performance.mark("drawn")));
}

function frontierSection({ points, axes }) {
  const y = { key: "tokens_per_s", label: "trained tokens/s", form: count };
  return section(
    "frontier",
    "The Pareto frontier",
    "A point is a policy in one world. It is on the frontier if no other point is better in one of speed, " +
      "staleness, bias and GPUs and as good in the rest. Hover over a point, or select it with Tab, to see its name.",
    legend([
      ["on the Pareto frontier", PALETTE[5]],
      ["beaten", PALETTE[0]],
    ]),
    make("div", { class: "panels" }, ...axes.map((x) => scatter(x, y, points))),
  );
}

function table({ columns, rows }) {
  return figures(columns, rows, "policy and world");
}

function meanings(columns) {
  return make(
    "dl",
    { class: "meanings" },
    ...columns.flatMap(({ label, means }) => [make("dt", {}, label), make("dd", {}, means)]),
  );
}

start().catch((error) => {
  document.getElementById("page").textContent = `This page cannot be drawn: ${error.message}`;
  throw error;
});
