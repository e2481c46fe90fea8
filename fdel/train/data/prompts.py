"""Tasks for learning from own samples: prompts as token ids, with all columns of their rows beside them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fdel import text
from fdel.train.data.files import sources
from fdel.train.data.images import Shown
from fdel.train.data.planning import order
from fdel.train.data.settings import Report, Settings
from fdel.train.data.store import tokenize


class Task(NamedTuple):
    """One row of the data. `number` is epoch * rows + row: the seeds of its samples come from it."""

    number: int
    prompt: tuple[int, ...]
    row: Mapping[str, Any] = {}  # all columns: the prompt as it was written, the answer, what rewards and tools want
    images: tuple[Shown, ...] = ()  # what the prompt shows and plays


@dataclass(frozen=True)
class Tasks:
    """The tasks of all epochs, `settings.batch` of them at a time; iterators have `get_state` and `set_state`, a number.

    All rows are in memory. An epoch leaves out what makes no whole batch.
    """

    rows: tuple[Task, ...]  # of the first epoch, before they are shuffled
    settings: Settings
    report: Report

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return len(self.rows) // self.settings.batch

    @property
    def total(self) -> int | None:
        """Batches of all epochs; None where they never end."""
        return None if self.settings.epochs is None else self.batches * self.settings.epochs

    def __getitem__(self, number: int) -> list[Task]:
        """Give a batch by its number: what it holds depends on nothing else."""
        epoch, batch = divmod(number, self.batches)
        chosen = order([len(self.rows)], None, self.settings, epoch)[batch * self.settings.batch :][
            : self.settings.batch
        ]
        return [self.rows[i]._replace(number=epoch * len(self.rows) + int(i)) for i in chosen]

    def __iter__(self) -> "TaskIterator":
        return TaskIterator(self)


@dataclass
class TaskIterator:
    """The batches of tasks, in order."""

    tasks: Tasks
    number: int = 0

    def __iter__(self) -> Iterator[list[Task]]:
        return self

    def __next__(self) -> list[Task]:
        if self.number == self.tasks.total:
            raise StopIteration
        self.number += 1
        return self.tasks[self.number - 1]

    def get_state(self) -> int:
        """Give the number of the next batch."""
        return self.number

    def set_state(self, number: int) -> None:
        """Go on from a state."""
        self.number = number


def tasks(given: Any, settings: Settings, tok: text.Tokenizer) -> Tasks:
    """Read tasks: of a `Source`, of several, or of rows in memory, each with a `prompt` (text or messages).

    A prompt of more than `settings.length` tokens is left out. ValueError for rows that make no batch.
    """
    settings = replace(settings, kind="prompt", packing=None)
    found, report = list[Task](), Report()
    for source in sources(given):
        for examples, more in tokenize(source, tok, settings):
            found += [Task(0, tuple(e.ids[0].tolist()), e.numbers["row"], *e.images) for e in examples]
            report += more
    if len(found) < settings.batch:
        raise ValueError(
            f"{len(found)} tasks make no batch of {settings.batch}; give more rows, or a smaller batch\n{report}"
        )
    return Tasks(tuple(found), settings, report)
