// Creates elements. Data becomes text, never markup.

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function section(id, title, about, ...children) {
  return make(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    make("h2", { id: `${id}-title` }, title),
    about ? make("p", { class: "about" }, about) : null,
    ...children,
  );
}

// `made`: the command, and when and by what version the page was made.
export function heading({ title, about, made }) {
  return make(
    "header",
    {},
    make("p", { class: "product" }, "rollout_sched"),
    make("h1", {}, title),
    ...about.map((text) => make("p", { class: "about" }, text)),
    ...(made ?? []).map((text, at) => (at ? make("p", { class: "about" }, text) : command(text))),
  );
}

// A line to copy, which goes on in the next line before an option only.
export function command(text) {
  const parts = text.split(/(?= --)/).map((part) => make("span", {}, part));
  return make("pre", { class: "command" }, ...parts);
}

// A part of a section with its own heading, for one policy.
export function panel(title, ...children) {
  return make("div", { class: "panel", "data-policy": title }, make("h3", {}, title), ...children);
}

export function legend(entries) {
  return make(
    "ul",
    { class: "legend" },
    ...entries.map(([label, colour]) => {
      const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
      swatch.style.background = colour;
      return make("li", {}, swatch, label);
    }),
  );
}

const tooltip = () => document.getElementById("tooltip");

export function showTooltip(lines, x, y) {
  const box = tooltip();
  box.replaceChildren(...lines.map((line) => make("div", {}, line)));
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const left = x + 14 + width > innerWidth ? x - width - 10 : x + 14;
  box.style.left = `${Math.max(4, left)}px`;
  box.style.top = `${Math.max(4, Math.min(y + 12, innerHeight - height - 4))}px`;
}

export function hideTooltip() {
  tooltip().hidden = true;
}
