"""What a data set is to become: `Settings`, and the `Report` of what became of its rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fdel.media.sight import Sight

PLACES = 5  # of each complaint, how many rows a report shows
COMPLAINTS = 20  # how many different ones it shows; messages may hold values from the rows
COMPARED = ("pairs", "triples", "unpaired")  # kinds of completions of a prompt
PER_TOKEN = ("process", "tagged", "spans")  # kinds whose labels stand at tokens

CHOICES = {
    "kind": ("sft", "pairs", "triples", "unpaired", "prompt", "embedding", "process", "labelled", "tagged", "spans"),
    "problem": ("single_label_classification", "multi_label_classification", "regression"),
    "learn": ("auto", "all", "completion", "assistant"),
    "packing": (None, "first_fit", "best_fit", "best_fit_split", "wrapped"),
    "overlong": ("truncate", "drop"),
    "bad_rows": ("skip", "raise"),
    "stop": ("first_exhausted", "longest"),
    "partial": ("drop", "pad"),
}


def check_ratios(fcm_min_ratio: float, fcm_max_ratio: float) -> None:
    """Raise ValueError for bounds between which no share of hidden tokens can be drawn."""
    if not 0 <= fcm_min_ratio <= fcm_max_ratio < 1:
        found = f"fcm_min_ratio={fcm_min_ratio:g}, fcm_max_ratio={fcm_max_ratio:g}"
        raise ValueError(f"{found}; expected 0 <= fcm_min_ratio <= fcm_max_ratio < 1")


@dataclass(frozen=True)
class Settings:
    """How rows become batches.

    kind      "sft"; "pairs" (DPO, CPO, ORPO, reward); "triples" (TPO); "unpaired" (KTO, BCO); "prompt"; "embedding";
              "process" (steps that are judged one by one); "labelled" (texts) and "tagged" (words), which a classifier
              learns; "spans" (answers to questions that stand in a text)
    batch     rows of a step, of all processes and microbatches together
    length    the most tokens of a row; a longer sequence loses its end
    packing   None, one example per row; "first_fit" or "best_fit", whole examples; "best_fit_split", longer ones in parts;
              "wrapped", all examples one after the other, cut at every `length` tokens; the tokens of an image, a video or
              a sound stay together, a cut within them is made before them
    learn     the tokens that "sft" learns: "all", the "completion" after a prompt, what the "assistant" says
              (`{% generation %}` blocks), or "auto": the completion where there is one, else all
    buckets   row lengths to pad to, beside `length`; rows of like lengths then share a batch
    overlong  "truncate", or "drop" examples longer than `length`
    bad_rows  "skip" rows that cannot be used, or "raise" at the first one
    shuffle   anew in every epoch; over the whole data set, in a stream within `window` examples
    epochs    how often the data is read; None: for ever
    window    how many examples are packed, sorted by length, or shuffled in a stream, together
    stop      of a mixture with weights: an epoch ends with the "first_exhausted" source, or after the "longest", while the
              others begin again
    block     of a mixture with weights: every `block` examples have the exact shares, in random order, and are packed and
              sorted by length among themselves; None: each prefix has them, up to one example, or where examples are
              packed or sorted, up to a window
    partial   the last incomplete batch of an epoch: "drop" it, or "pad" it with empty rows
    stream    tokenize while training and keep nothing, instead of tokenizing everything first
    kl        of "unpaired": with "kl", each prompt with the completion of another row, for KTO's own loss
    negatives of "embedding": hard negatives of a row; one with fewer has empty sequences, of one with more the first count
    separator of "process": the text after each step, at whose last token its label stands
    last_only of "process": learn the last step's label alone
    labels    of "labelled" and "tagged": the labels' names, in the order of their numbers
    problem   of "labelled", as transformers' problem_type: a row has one label, some of them, or a number for each
    vocab     how many token ids the model has: a row with others is bad, a tokenizer that gives them an error; None: any
    sight     how the model sees and hears (`media.sight.read`): rows of "sft", "pairs", "triples", "unpaired" and "prompt"
              may show images and videos, and play sounds (see `images`); None: a row with any is bad
    max_prompt, max_completion
              of "pairs", "triples" and "unpaired": the most tokens of each; a prompt loses its start, a completion its end
    fcm_min_ratio, fcm_max_ratio
              of "sft", forgetful causal masking (arXiv:2210.13432): each row draws a ratio between the two, and hides each
              token with that probability as a key from all queries, its own too, in all layers; first tokens are seen
    prefetch  batches made ahead
    threads   that make batches and tokenize
    """

    kind: str = "sft"
    batch: int = 8
    length: int = 1024
    packing: str | None = None
    learn: str = "auto"
    buckets: tuple[int, ...] = ()
    overlong: str = "truncate"
    bad_rows: str = "skip"
    shuffle: bool = True
    seed: int = 0
    epochs: int | None = 1
    window: int = 4096
    stop: str = "first_exhausted"
    block: int | None = None
    partial: str = "drop"
    stream: bool = False
    kl: bool = False
    negatives: int = 1
    separator: str = "\n"
    last_only: bool = False
    labels: tuple[str, ...] = ()
    problem: str = "single_label_classification"
    vocab: int | None = None
    sight: Sight | None = None
    max_prompt: int | None = None
    max_completion: int | None = None
    fcm_min_ratio: float = 0.0
    fcm_max_ratio: float = 0.0
    prefetch: int = 4
    threads: int = 2

    def __post_init__(self) -> None:
        """Raise ValueError for what has no meaning."""
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}; expected one of {', '.join(map(str, known))}")
        if min(self.batch, self.length, self.window, self.threads, self.block or 1, *self.buckets) < 1:
            raise ValueError("batch, length, window, threads, block and buckets are numbers of at least 1")
        if min(1 if n is None else n for n in (self.vocab, self.max_prompt, self.max_completion)) < 1:
            raise ValueError("vocab, max_prompt and max_completion are numbers of at least 1, or None")
        if self.kind not in COMPARED and (self.max_prompt or self.max_completion):
            raise ValueError(
                f"max_prompt and max_completion are for kind='pairs', 'triples' and 'unpaired', not {self.kind!r}"
            )
        check_ratios(self.fcm_min_ratio, self.fcm_max_ratio)
        if self.fcm_max_ratio and self.kind != "sft":
            raise ValueError(f"fcm_max_ratio={self.fcm_max_ratio} is for kind='sft', not {self.kind!r}; leave it at 0")
        if self.negatives < 0 or not self.separator:
            found = f"negatives={self.negatives}, separator={self.separator!r}"
            raise ValueError(f"{found}; expected 0 or more, and a text")
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs={self.epochs}; expected at least 1, or None to go on for ever")
        if self.packing and (self.kind != "sft" or self.buckets):
            others = "the losses of the others need one sequence a row"
            raise ValueError(f"packing is for kind='sft' without buckets; {others}")
        if any(b > self.length for b in self.buckets):
            raise ValueError(f"buckets={self.buckets} go beyond length={self.length}")

    @property
    def sides(self) -> int:
        """Sequences of an example: chosen and rejected, with a gold one or without, or a query and its documents."""
        return {"pairs": 2, "triples": 3, "embedding": 2 + self.negatives}.get(self.kind, 1)

    @property
    def targets(self) -> int:
        """Numbers that a row of "labelled" is to be told: the label's own, or one for each label."""
        return 1 if self.problem == CHOICES["problem"][0] else max(1, len(self.labels))

    @property
    def mismatched(self) -> bool:
        """Whether a row has a second sequence, its "kl"."""
        return self.kind == "unpaired" and self.kl

    @property
    def whole(self) -> bool:
        """Whether examples keep all their tokens, since packing cuts them."""
        return self.packing in ("best_fit_split", "wrapped")


@dataclass(frozen=True)
class Report:
    """What became of rows: read and examples made of them, tokens, those to be learnt; each complaint with its places.

    Of those that masks have to be learnt, `shown` stand for what is seen or heard: losses leave them out.
    """

    read: int = 0
    kept: int = 0
    tokens: int = 0
    learnt: int = 0
    shown: int = 0
    notes: Mapping[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)

    def __add__(self, other: "Report") -> "Report":
        notes = dict(self.notes)
        for reason, (count, places) in other.notes.items():
            reason = reason if reason in notes or len(notes) < COMPLAINTS else "other complaints"
            before = notes.get(reason, (0, ()))
            notes[reason] = before[0] + count, (*before[1], *places)[:PLACES]
        read, kept = self.read + other.read, self.kept + other.kept
        learnt, shown = self.learnt + other.learnt, self.shown + other.shown
        return Report(read, kept, self.tokens + other.tokens, learnt, shown, notes)

    def __str__(self) -> str:
        learnt = f"{self.learnt - self.shown} of them to be learnt"
        head = f"{self.read} rows read, {self.kept} examples, {self.tokens} tokens, {learnt}"
        return "\n".join([head, *(f"  {n} x {reason}: {', '.join(at)}" for reason, (n, at) in self.notes.items())])


def note(reason: str, place: str) -> Report:
    """Report one complaint."""
    return Report(notes={reason: (1, (place,))})
