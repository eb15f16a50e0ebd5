// Formats figures as the report in a terminal does.

export function seconds(value) {
  if (value < 0) return `${seconds(-value)} ago`;
  if (value >= 100) return `${grouped(Math.round(value))} s`;
  return value >= 1 ? `${value.toFixed(1)} s` : `${value.toFixed(2)} s`;
}

export function count(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  return value >= 1e4 ? `${(value / 1e3).toFixed(1)} k` : grouped(Math.round(value));
}

export const percent = (share) => `${(100 * share).toFixed(1)} %`;

export function grouped(value) {
  return String(value).replace(/\B(?=(\d{3})+$)/g, ",");
}
