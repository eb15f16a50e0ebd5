// The page of a replay, of a grid of replays, or of a journal.

import { answerSection } from "./answer.js";
import { heading, make } from "./dom.js";
import { fleetSection } from "./fleet_section.js";
import { unpacked } from "./packed.js";
import {
  bubblesSection,
  figuresSection,
  lengthsSection,
  levelsSection,
  stalenessSection,
  tailSection,
} from "./sections.js";

const DRAWN = 4; // with more policies than this, only some are drawn at first

async function start() {
  const data = await unpacked(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  const shown = new Set(drawnAtFirst(data));
  page.replaceChildren(heading(data), ...sections(data));
  page.querySelector("#fleet")?.before(choice(data, shown, () => show(page, shown)));
  show(page, shown);
  requestAnimationFrame(() => setTimeout(() => performance.mark("drawn")));
}

// The first policy, and the fastest of the others that are on the frontier.
function drawnAtFirst({ policies, answer }) {
  const names = policies.map(({ name }) => name);
  if (names.length <= DRAWN || !answer) return names.slice(0, Math.max(DRAWN, answer ? 0 : names.length));
  const fast = [...answer.points].sort((one, other) => other.frontier - one.frontier || other.speed - one.speed);
  return [...new Set([names[0], ...fast.map(({ name }) => name)])].slice(0, DRAWN);
}

function choice({ policies }, shown, changed) {
  if (policies.length < 2) return make("div");
  const boxes = policies.map(({ name }) => {
    const box = make("input", { type: "checkbox", checked: shown.has(name) });
    box.addEventListener("change", () => {
      if (box.checked) shown.add(name);
      else shown.delete(name);
      changed();
    });
    return make("label", {}, box, ` ${name}`);
  });
  return make("div", { class: "controls" }, "policies drawn below: ", ...boxes);
}

function show(page, shown) {
  page.querySelectorAll("section:not(#answer) .panel").forEach((each) => {
    each.hidden = !shown.has(each.dataset.policy);
  });
}

function sections(data) {
  const { policies, words } = data;
  if (!policies.length) return [answerSection(data)];
  const fleet = fleetSection(policies, words, data.note);
  return [
    answerSection(data),
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
