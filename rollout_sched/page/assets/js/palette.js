// Colours that colour-blind people can distinguish: Okabe and Ito, "Color Universal Design", 2008.

export const PALETTE = [
  "#0072b2", // blue
  "#e69f00", // orange
  "#009e73", // bluish green
  "#cc79a7", // reddish purple
  "#56b4e9", // sky blue
  "#d55e00", // vermillion
  "#b8a800", // yellow, darkened to be visible on white
];

export const WARNING = PALETTE[5];

export const colourOf = (number) => PALETTE[number % PALETTE.length];

// A colour from the style sheet, which handles dark mode.
export const themed = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export function onTheme(redraw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}
