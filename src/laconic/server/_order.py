"""Who may read weights and whose gradient may be applied, so that none is too old."""

from __future__ import annotations


class Order:
    """A bounded delay: a gradient is applied at most τ updates after its weights were read.

    Weights have version v after v updates. A worker that has read version r and not been applied
    yet must be applied while the version is at most r + τ, its deadline. With deadlines of readers
    sorted, d_0 ≤ d_1 ≤ .., applying them one after another meets all of them if and only if

        d_p ≥ v + p    for all p                                                             (*)

    1. One more reader gets the latest deadline, v + τ, at place p = the number of readers: (*)
       holds if there were at most τ readers. More must wait before they read.
    2. A gradient may be applied if (*) holds for the others with v + 1. Else it must wait until the
       readers before it, who are slower, have been applied.

    The reader with the earliest deadline is never kept waiting, so there is always one who can go
    on. With τ ≥ workers - 1 nobody waits to read; with τ = 0 workers take turns.
    """

    def __init__(self, most: int) -> None:
        self.most, self.version = most, 0
        self.readers: dict[int, int] = {}

    def may_read(self) -> bool:
        """Whether one more worker may read now."""
        return len(self.readers) <= self.most

    def read(self, worker: int) -> int:
        """The version that the worker has read."""
        self.forget(worker)  # it goes behind the others
        self.readers[worker] = self.version
        return self.version

    def may_apply(self, worker: int) -> bool:
        """Whether this reader's gradient may be applied now."""
        # in order of reading, which is that of deadlines
        others = [version for name, version in self.readers.items() if name != worker]
        return all(
            version + self.most >= self.version + 1 + place for place, version in enumerate(others)
        )

    def apply(self, worker: int) -> int:
        """One update more; how many there were since its weights were read."""
        delay = self.version - self.readers.pop(worker)
        self.version += 1
        return delay

    def forget(self, worker: int) -> None:
        """It will not be applied."""
        self.readers.pop(worker, None)
