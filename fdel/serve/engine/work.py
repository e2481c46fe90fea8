"""What is asked of a device: requests, and what one step does for them. Plain Python."""

from dataclasses import dataclass, field
from typing import Any

NO_ROW = -1  # where a request stands that does not run


@dataclass(eq=False)
class Request:
    """One output of a prompt. Plans run ahead of what is read: that adds `unread` tokens unless it ends, `most` at most."""

    id: int
    tokens: list[int]  # prompt and output, as far as they are known here
    prompt: int  # tokens of the prompt
    limit: int  # the most tokens of prompt and output
    priority: int = 0  # the highest first
    key: str = ""  # whose share it uses
    salt: bytes = b""  # who may share its pages
    adapter: str = ""
    media: Any = None  # its pictures, a `pictures.PromptMedia`
    whole: bool = False  # the tokens of a picture see each other: no chunk ends inside of one
    after: "Request | None" = None  # the first output of the same request: wait until that is computed
    arrival: int = 0
    row: int = NO_ROW  # its row on the device, while it runs
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of its published pages
    computed: int = 0  # tokens of the prompt, or of what is computed again, that plans have covered
    stored: int = 0  # tokens whose keys and values are certainly in its pages
    cached: int | None = None  # tokens of the prompt that were in the cache when it was admitted first
    in_flight: int = 0  # steps that hold it and are not committed
    unread: int = 0
    most: int = 0
    decoding: bool = False  # all known tokens are computed or planned
    done: bool = False
    failed_at: int = 0  # tokens that it may have had when a step with it raised; with more it leaves quarantine

    @property
    def rank(self) -> tuple[int, int]:
        """Who keeps its pages: the highest priority, then the oldest."""
        return -self.priority, self.arrival


@dataclass(frozen=True)
class Chunk:
    """Known tokens `start` to `start + count` of a request; after the `last` one a token is drawn."""

    request: Request
    start: int
    count: int
    last: bool


@dataclass
class StepPlan:
    """What one step does: give rows to new requests, copy pages, compute chunks, and continue sequences by a token."""

    admitted: list[Request] = field(default_factory=list)
    copies: list[tuple[Request, int, int]] = field(default_factory=list)  # for whom, from which page, to which
    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)
