// The page of a replay or a journal.

import { make } from "./dom.js";
import { fleetSection } from "./fleet_section.js";
import { unpacked } from "./packed.js";
import {
  bubblesSection,
  figuresSection,
  lengthsSection,
  levelsSection,
  stalenessSection,
  tailSection,
  verdictSection,
} from "./sections.js";

async function start() {
  const data = await unpacked(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  const shown = new Set(data.policies.map(({ name }) => name));
  page.replaceChildren(heading(data, shown, () => show(page, shown)), ...sections(data));
  requestAnimationFrame(() => setTimeout(() => performance.mark("drawn")));
}

function heading(data, shown, changed) {
  const boxes = data.policies.map(({ name }) => {
    const box = make("input", { type: "checkbox", checked: true });
    box.addEventListener("change", () => {
      if (box.checked) shown.add(name);
      else shown.delete(name);
      changed();
    });
    return make("label", {}, box, ` ${name}`);
  });
  return make(
    "header",
    {},
    make("h1", {}, data.title),
    ...data.about.map((text) => make("p", { class: "about" }, text)),
    boxes.length > 1 ? make("div", { class: "controls" }, "policies: ", ...boxes) : null,
  );
}

function show(page, shown) {
  page.querySelectorAll(".panel").forEach((each) => {
    each.hidden = !shown.has(each.dataset.policy);
  });
}

function sections(data) {
  const { policies, words } = data;
  const fleet = fleetSection(policies, words, data.note);
  return [
    verdictSection(data.verdict, data.warnings),
    figuresSection(data.tables),
    fleet.element,
    tailSection(policies),
    bubblesSection(policies),
    stalenessSection(policies),
    lengthsSection(policies, data.offered),
    levelsSection(policies, fleet.shared),
  ].filter((each) => each !== null);
}

start().catch((error) => {
  document.getElementById("page").textContent = `This page cannot be drawn: ${error.message}`;
  throw error;
});
