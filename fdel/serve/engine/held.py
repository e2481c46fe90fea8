"""Requests that wait for a program of the model's towers, which is compiled in a thread while all others go on.

Pictures and sounds are padded to few sizes (`pictures.rounded`): of up to 1,024 patches there are 16, and 8 more for each
doubling, so a client that sends pictures of all sizes makes no more programs than that. Plain Python.
"""

from collections import Counter
from dataclasses import dataclass, field

from fdel.serve.engine.pictures import Size
from fdel.serve.engine.reply import Job


@dataclass
class Held:
    """Jobs that no step may have yet, and the sizes that each waits for.

    One program is compiled at a time, for the highest priority, then the key for which the fewest were since any waited,
    then the oldest: whoever sends many sizes holds up another by one.
    """

    jobs: dict[int, tuple[Job, set[Size]]] = field(default_factory=dict)  # by the request's id
    compiling: Size | None = None
    times: Counter = field(default_factory=Counter)  # programs that were begun for each key

    @property
    def sizes(self) -> set[Size]:
        """All sizes that are waited for."""
        return {size for _, sizes in [*self.jobs.values()] for size in sizes}  # other threads add meanwhile

    def next(self) -> Size | None:
        """Name the program to compile now, until `done`; None if there is none, or one is being compiled."""
        if not self.jobs:
            self.times.clear()
        if self.compiling is not None or not self.jobs:
            return None
        order = lambda found: (-found[0].request.priority, self.times[found[0].request.key])
        job, sizes = min(self.jobs.values(), key=order)
        self.times[job.request.key] += 1
        self.compiling = min(sizes)
        return self.compiling

    def done(self, size: Size) -> list[Job]:
        """Note that a program was compiled, or could not be: the jobs that wait for it."""
        self.compiling = None
        return [job for job, sizes in self.jobs.values() if size in sizes]
