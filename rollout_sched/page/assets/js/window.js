// The visible time range. Several drawings share one, so they zoom together.

const CLOSEST_S = 1e-3;

export class TimeWindow {
  constructor(end) {
    this.end = Math.max(end, CLOSEST_S);
    this.from = 0;
    this.to = this.end;
    this.watchers = [];
  }

  watch(watcher) {
    this.watchers.push(watcher);
  }

  show(from, to) {
    const length = Math.min(this.end, Math.max(CLOSEST_S, to - from));
    this.from = Math.max(0, Math.min(from, this.end - length));
    this.to = this.from + length;
    this.watchers.forEach((watcher) => watcher(this));
  }

  // Zooms by a factor around a time that stays in place.
  zoom(factor, about = (this.from + this.to) / 2) {
    this.show(about - (about - this.from) / factor, about + (this.to - about) / factor);
  }

  pan(seconds) {
    this.show(this.from + seconds, this.to + seconds);
  }

  all() {
    this.show(0, this.end);
  }
}
