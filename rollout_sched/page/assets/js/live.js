// The live page: signs in and draws the gateway's state each second.

import { hideTooltip, make, section } from "./dom.js";
import { events } from "./event_stream.js";
import { fleetSection } from "./fleet_section.js";
import { count, percent, seconds } from "./format.js";
import { headline } from "./headline.js";
import { LiveRecord } from "./live_record.js";
import { LiveSeries, seriesSection } from "./live_series.js";
import { unpacked } from "./packed.js";
import { figures } from "./sections.js";
import { forgetKey, knownKey, signIn } from "./sign_in.js";

const AGAIN_S = 2;
const FIRST_S = 60; // initial width of the timeline in seconds
const page = document.getElementById("page");

async function start() {
  const { words } = await unpacked(document.getElementById("data").textContent);
  const enter = () => look(words);
  if (knownKey()) enter();
  else signIn(page, "", enter);
}

// Runs until the key is refused; reconnects if the connection is lost.
async function look(words) {
  const view = new LiveView(words);
  for (;;) {
    try {
      await events("admin/live", knownKey(), (state) => view.show(state));
      view.say("the gateway has ended the stream");
    } catch (error) {
      if (error.status === 401 || error.status === 403) {
        forgetKey();
        signIn(page, error.message, () => look(words));
        return;
      }
      view.say(`not connected: ${error.message}`);
    }
    await new Promise((resolve) => setTimeout(resolve, 1000 * AGAIN_S));
  }
}

class LiveView {
  constructor(words) {
    this.words = words;
    this.record = new LiveRecord();
    this.series = new LiveSeries();
    this.said = make("p", { role: "status", class: "error" });
    this.boxes = {};
    this.fleet = null;
  }

  say(text) {
    this.said.textContent = text;
  }

  show(state) {
    this.say(state.broken ? `the scheduler has stopped: ${state.broken}` : "");
    this.record.take(state);
    this.series.take(state);
    if (this.fleet === null) this.build(state);
    else this.fleet.timelines[0].replace(this.record.record());
    this.plots.update();
    for (const [name, content] of Object.entries(contents(state, this.series.columns))) {
      this.boxes[name].replaceChildren(...content);
    }
    page.dataset.updates = Number(page.dataset.updates ?? 0) + 1;
  }

  build(state) {
    const record = this.record.record();
    this.fleet = fleetSection([{ name: state.policy, record }], this.words, "The last five minutes.");
    this.fleet.shared.show(record.end_s - FIRST_S, record.end_s);
    this.plots = seriesSection(this.series);
    const box = (name, kind = "") => (this.boxes[name] = make("div", { class: kind }));
    const leave = make("button", { type: "button", onclick: signOut }, "sign out");
    page.replaceChildren(
      make("header", {}, make("p", { class: "product bar" }, "rollout_sched", leave), make("h1", {}, `${state.policy}, live`)),
      this.said,
      box("headline", "headline"),
      box("head"),
      this.fleet.element,
      this.plots.element,
      section("step", "This step and earlier ones", null, box("step", "tall")),
      section("instances", "Instances", null, box("instances")),
      section("waste", "Staleness and waste since this page was opened", null, box("waste")),
      section("changes", "Latest changes", null, box("changes", "tall")),
    );
    hideTooltip();
  }
}

function signOut() {
  forgetKey();
  location.reload();
}

function contents(state, columns) {
  return {
    headline: headline(state, columns),
    head: [make("p", {}, load(state))],
    instances: [instances(state.instances)],
    step: [make("p", {}, stepLine(state)), steps(state.steps)],
    waste: [waste(state)],
    changes: [changes(state)],
  };
}

function load({ version, fleet_version: oldest, requests, waits_for: missing, batches }) {
  const said = [
    oldest === version ? `version ${version}` : `version ${version}, the oldest instance has ${oldest}`,
    `${count(batches)} batches delivered`,
    `${count(requests.in_flight)} requests in flight, ${count(requests.waiting)} waiting, ${count(requests.parked)} parked`,
    ...(missing.batch ? [`the batch waits for ${missing.batch}`] : []),
    ...(missing.weights ? [`weights wait for ${missing.weights}`] : []),
  ];
  return said.join(" \u00b7 ");
}

const INSTANCE_COLUMNS = ["state", "version", "in flight", "slots", "running", "queued", "KV"];

function instances(all) {
  const drafts = all.some((each) => each.draft_acceptance !== null);
  const rows = all.map((each) => ({
    name: each.url,
    cells: [
      [each.status, each.held ? "held" : "", each.leaving ? "leaving" : "", each.reason]
        .filter(Boolean)
        .join(", "),
      each.version ?? "-",
      count(each.in_flight),
      count(each.slots),
      each.running ?? "-",
      each.waiting ?? "-",
      asShare(each.kv_usage),
      ...(drafts ? [asShare(each.draft_acceptance)] : []),
    ].map(String),
  }));
  const labels = [...INSTANCE_COLUMNS, ...(drafts ? ["drafts accepted"] : [])];
  return figures(labels.map((label) => ({ label })), rows, "instance");
}

function asShare(part) {
  return part === null ? "-" : percent(part);
}

function stepLine({ step, prompts_per_step: wanted, trainer_waiting: waiting }) {
  const whole = step.complete + step.in_batch;
  const more = whole > wanted ? ` and ${count(whole - wanted)} for later` : "";
  return [
    `step ${step.number + 1}, for ${seconds(step.elapsed_s)}`,
    `${count(Math.min(whole, wanted))} of ${count(wanted)} groups whole${more}`,
    `${count(step.finished)} samples ended`,
    waiting ? "the trainer waits" : "no trainer asks for a batch now",
  ].join(" \u00b7 ");
}

const STEP_COLUMNS = ["ended", "t50", "t90", "t99", "span", "samples", "staleness", "idle", "discarded"];

function steps(all) {
  const rows = [...all].reverse().map((step) => ({
    name: `version ${step.version}`,
    cells: [
      seconds(step.end_s),
      ...[step.t50_s, step.t90_s, step.t99_s].map((time) => (time === null ? "-" : seconds(time))),
      seconds(step.span_s),
      count(step.samples),
      `up to ${step.max_staleness}`,
      percent(step.idle_bubble),
      `${count(step.discarded_tokens)} tokens`,
    ],
  }));
  if (!rows.length) return make("p", { class: "about" }, "No step has ended yet.");
  return figures(STEP_COLUMNS.map((label) => ({ label })), rows, "step");
}

function waste({ staleness, waste: byReason }) {
  const rows = [
    ...Object.entries(staleness).map(([versions, samples]) => [
      `samples ${versions} versions old`,
      count(samples),
    ]),
    ...Object.entries(byReason).map(([reason, tokens]) => [`tokens thrown away: ${reason}`, count(tokens)]),
  ];
  if (!rows.length) return make("p", { class: "about" }, "Nothing has been delivered or discarded yet.");
  return figures([{ label: "" }], rows.map(([name, cell]) => ({ name, cells: [cell] })), "");
}

function changes({ changes: all, now }) {
  const rows = [...all].reverse().map(({ at, level, text }) =>
    make(
      "tr",
      { class: `level-${level}` },
      make("td", {}, `${seconds(Math.max(0, now - at))} ago`),
      make("td", {}, level),
      make("td", { class: "text" }, text),
    ),
  );
  if (!rows.length) return make("p", { class: "about" }, "Nothing since this page was opened.");
  return make("div", { class: "scrolls", tabindex: "0" }, make("table", {}, make("tbody", {}, ...rows)));
}

start();
