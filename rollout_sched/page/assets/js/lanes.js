// Spans sorted by place, so that those in view are found without reading all others.

export class Lanes {
  // `record`: a RunRecord (run_record.py). A lane is one place of one instance; its spans do not
  // overlap and are recorded in order of time.
  constructor(record) {
    this.record = record;
    const { spans, attempts } = record;
    this.placesOf = new Uint32Array(record.instances.length).fill(1);
    for (let row = 0; row < attempts.place.length; row++) {
      const instance = attempts.instance[row];
      if (attempts.place[row] > this.placesOf[instance]) this.placesOf[instance] = attempts.place[row];
    }
    this.firstOf = new Uint32Array(record.instances.length + 1);
    this.placesOf.forEach((places, at) => (this.firstOf[at + 1] = this.firstOf[at] + places));
    this.#sort(spans.attempt.length);
  }

  // A counting sort: it keeps the order within a lane.
  #sort(length) {
    const lanes = this.firstOf[this.firstOf.length - 1];
    this.begins = new Uint32Array(lanes + 1);
    for (let span = 0; span < length; span++) this.begins[this.laneOf(span) + 1]++;
    for (let lane = 0; lane < lanes; lane++) this.begins[lane + 1] += this.begins[lane];
    const next = this.begins.slice(0, lanes);
    this.order = new Uint32Array(length);
    for (let span = 0; span < length; span++) this.order[next[this.laneOf(span)]++] = span;
  }

  laneOf(span) {
    const { attempts, spans } = this.record;
    const attempt = spans.attempt[span];
    return this.firstOf[attempts.instance[attempt]] + attempts.place[attempt] - 1;
  }

  endOf(span) {
    return this.record.spans.start[span] + this.record.spans.length[span];
  }

  // The index in `order` of the lane's first span that ends after `time`.
  firstAfter(lane, time, from = this.begins[lane]) {
    let low = from;
    let high = this.begins[lane + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.endOf(this.order[middle]) > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // The lane's span at `time`, or within `within` seconds after it; -1 for none.
  at(lane, time, within) {
    const place = this.firstAfter(lane, time);
    if (place === this.begins[lane + 1]) return -1;
    const span = this.order[place];
    return this.record.spans.start[span] <= time + within ? span : -1;
  }

  // The previous (-1) or next (1) span in the lane; at either end the same span.
  beside(span, step) {
    const lane = this.laneOf(span);
    const place = this.firstAfter(lane, this.record.spans.start[span]) + step;
    const inLane = place >= this.begins[lane] && place < this.begins[lane + 1];
    return inLane ? this.order[place] : span;
  }
}
