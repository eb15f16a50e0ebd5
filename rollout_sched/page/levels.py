"""Records a level over time in a bounded number of buckets, however long the run is."""

from __future__ import annotations

#: Buckets of a series; when all are used, pairs of them are merged.
MOST = 512

#: Initial width of a bucket in seconds.
FINEST_S = 0.125


class LevelSeries:
    """The mean and the peak of a level in each bucket of time.

    The level is 0 until it is set. `width_s` is the current width of a bucket.
    """

    def __init__(self) -> None:
        self.width_s = FINEST_S
        self._areas: list[float] = []
        self._peaks: list[float] = []
        self._level = 0.0
        self._now = 0.0

    def set(self, now: float, level: float) -> None:
        """Set the level from `now` on; `now` must not go back."""
        self._pass(now)
        self._level = level
        if self._peaks and now < len(self._peaks) * self.width_s:
            self._peaks[-1] = max(self._peaks[-1], level)

    def means(self, end_s: float) -> list[float]:
        """The mean of each bucket up to `end_s`; the last bucket may be shorter."""
        self._pass(end_s)
        lengths = [self.width_s] * len(self._areas)
        if lengths:
            lengths[-1] = self._now - self.width_s * (len(lengths) - 1)
        return [
            area / length if length > 0 else self._level
            for area, length in zip(self._areas, lengths, strict=True)
        ]

    def peaks(self, end_s: float) -> list[float]:
        self._pass(end_s)
        return list(self._peaks)

    def _pass(self, now: float) -> None:
        while now > self.width_s * MOST:
            self._merge()
        while self._now < now:
            place = min(int(self._now / self.width_s), MOST - 1)
            if place == len(self._areas):
                self._areas.append(0.0)
                self._peaks.append(self._level)
            ends = (place + 1) * self.width_s
            until = now if now < ends else ends
            if until <= self._now:  # rounding error in the sum of widths
                until = now
            self._areas[place] += self._level * (until - self._now)
            self._peaks[place] = max(self._peaks[place], self._level)
            self._now = until

    def _merge(self) -> None:
        self.width_s *= 2
        odd = len(self._areas) % 2
        areas, peaks = [*self._areas, *[0.0] * odd], [*self._peaks, *[0.0] * odd]
        self._areas = [a + b for a, b in zip(areas[::2], areas[1::2], strict=True)]
        self._peaks = [max(a, b) for a, b in zip(peaks[::2], peaks[1::2], strict=True)]
