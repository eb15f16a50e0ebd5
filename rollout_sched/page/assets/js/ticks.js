// Round numbers for an axis.

// About `most` of them between `from` and `to`, each with its label.
export function ticks(from, to, most) {
  const raw = (to - from) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const found = [];
  for (let number = Math.ceil(from / step); number * step <= to; number++) {
    found.push({ at: number * step, label: (number * step).toFixed(digits) });
  }
  return found;
}
