// The last minutes of a live run as a record for a timeline (run_record.py).

const KEPT_S = 300;
const MOST = 20000; // attempts kept; beyond it the oldest are dropped
const MARKED = new Set(["delivered", "published", "lost", "left", "joined", "restarted"]);
const ALONE_INDEX = 4294967295;

export class LiveRecord {
  constructor() {
    this.attempts = new Map();
    this.instances = [];
    this.marks = [];
    this.now = 0;
  }

  take(state) {
    if (state.anew) {
      this.attempts.clear();
      this.marks = [];
    }
    this.now = state.now;
    this.instances = state.instances.map(({ url }) => url);
    const known = state.anew ? -1 : (this.marks.at(-1)?.at ?? -1);
    this.marks.push(...state.changes.filter(({ at, kind }) => at > known && MARKED.has(kind)));
    while (this.marks.length && this.marks[0].at < this.from) this.marks.shift();
    for (const attempt of state.attempts) this.attempts.set(attempt[0], attempt);
    this.#forget();
  }

  // Drops attempts that ended before the kept time, and the oldest beyond MOST.
  #forget() {
    for (const [number, attempt] of this.attempts) {
      const [start, length] = attempt[14].at(-1) ?? [this.now, 0];
      if (start + length < this.from) this.attempts.delete(number);
    }
    for (const number of this.attempts.keys()) {
      if (this.attempts.size <= MOST) return;
      this.attempts.delete(number);
    }
  }

  get from() {
    return this.now - KEPT_S;
  }

  // Times count from the start of the kept period.
  record() {
    const groups = new Map();
    const requests = { group: [], index: [] };
    const attempts = { request: [], instance: [], place: [], context: [], before: [], turn: [] };
    Object.assign(attempts, { waited: [], since: [], cause: [], outcome: [], number: [] });
    const spans = { attempt: [], start: [], length: [], version: [], tokens: [] };
    const named = new Map();
    for (const attempt of this.attempts.values()) {
      const [number, group, index, instance, place, start, version, context, before, turn] = attempt;
      const [waited, since, cause, outcome, made] = attempt.slice(10);
      const at = this.instances.indexOf(instance);
      if (at < 0) continue;
      if (!groups.has(group)) groups.set(group, groups.size);
      const name = `${group}/${index}`;
      if (!named.has(name)) {
        named.set(name, named.size);
        requests.group.push(groups.get(group));
        requests.index.push(index < 0 ? ALONE_INDEX : index);
      }
      const row = attempts.request.length;
      const values = [named.get(name), at, place, context, before, turn, waited, since, cause, outcome, number];
      Object.values(attempts).forEach((column, each) => column.push(values[each]));
      const pieces = made.length ? made : [[start, this.now - start, version, 0]];
      for (const [from, length, by, tokens] of pieces) {
        const piece = [row, from - this.from, length, by, tokens];
        Object.values(spans).forEach((column, each) => column.push(piece[each]));
      }
    }
    return {
      end_s: KEPT_S,
      zero: KEPT_S,
      instances: this.instances,
      groups: [...groups.keys()],
      requests,
      attempts,
      spans,
      marks: this.marks
        .filter(({ at }) => at >= this.from)
        .map(({ at, kind, text }) => [at - this.from, kind, text]),
    };
  }
}
