"""What a trainer type is: one record. A file of this folder declares one or a few, and `__init__` names the file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fdel.models.pooling import Pooling
from fdel.recipe.parse import key
from fdel.train import losses


class Objective(NamedTuple):
    """What is minimised: a loss `rows(params, batch, given) -> (sum, sums)`, or two halves if there is a `total`.

    Then `rows` gives each row's outputs, and `total(outputs, batch, given) -> (sum, sums)` the loss of all. `coupled`: a
    row's loss depends on the other rows of its batch. `prepare(batch)` goes before the batch is cut into microbatches.
    """

    rows: Callable
    total: Callable | None = None
    coupled: bool = False
    prepare: Callable | None = None


@dataclass(frozen=True)
class Samples:
    """How a trainer type learns from its own samples.

    batch: `batch(keys, samples, rewards, put)` makes a step's batch of what was drawn and its rewards, with the help of
    `put(samples, advantages, learn=...)`, which is `rollout.collate`.
    first: `first(keys, model)` gives `f(params, batch, given)`: columns of the batch that a step computes once, before its
    updates. Without it, several updates have "old", the log-probabilities of drawn tokens.
    then: `then(keys, batch)` gives the whole batch with these columns as the updates learn it.
    share: of the steps that learn samples; the others learn rows of the data.
    each: samples of a row of the batch.
    rival: the policy draws the first of two samples of a prompt, and a mixture with the reference, which has this share of
    it (`rollout.mixture`), the other one.
    sides: how many samples of a prompt the policy draws, and how many its rival, where it is not one each.
    writes: the share of the steps whose samples the policy draws, and the teacher those of the others; None: all.
    reads: `batch` is given the tokenizer too, as `tok`, and how the model sees, as `sight`.
    """

    batch: Callable[..., Any]
    first: Callable[..., Callable] | None = None
    then: Callable[..., Any] | None = None
    share: Callable[[Any], float] = lambda k: 1.0
    each: int = 1
    rival: Callable[[Any], float] | None = None
    sides: Callable[[Any], tuple[int, int]] = lambda k: (1, 1)
    writes: Callable[[Any], float | None] = lambda k: None
    reads: bool = False


@dataclass(frozen=True)
class Method:
    """A trainer type. All that is special about it stands here; nothing else tests its name.

    keys: a frozen dataclass of the keys that it reads beside those of all types, with its defaults.
    rate: default learning rate, TRL's.
    objective: `objective(keys, model, remat=..., teacher=...)`, the teacher only where there is one. ValueError for keys
    that do not fit the model.
    loss: what of it needs no model. ValueError for keys that do not go together.
    data: the fields of `train.data.Settings` that the type decides.
    column: what `content_field` names of a row.
    reference, teacher: it compares with a reference model (or its keys say so), it learns from a teacher.
    samples: it learns from its own samples, and how.
    head: kind and labels of a head in place of the output projection (`models.heads`), which is trained whole.
    config: what is said of that head in config.json.
    pooling: how it embeds texts, which is written beside the model as sentence-transformers does.
    extra: what the state keeps beside the parameters, by name; the loss is given it, and `keep(step)` renews it.
    keeps_dropout: as in TRL, dropout is not switched off by itself.
    """

    name: str
    keys: type
    rate: float
    objective: Callable[..., Objective]
    loss: Callable[[Any], Any] = lambda k: None
    data: Callable[[Any], dict[str, Any]] = lambda k: {}
    column: str = "prompt"
    reference: bool | Callable[[Any], bool] = False
    teacher: bool = False
    samples: Samples | None = None
    head: Callable[[Any], tuple[str, int]] | None = None
    config: Callable[[Any], dict[str, Any]] = lambda k: {}
    pooling: Callable[[Any], Pooling] | None = None
    extra: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    keep: Callable[[Callable], Callable] = lambda step: step
    keeps_dropout: bool = False


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters, the names as PEFT's; the rest of the model is frozen."""

    r: int = key(16, "rank", positive=True)
    lora_alpha: float = key(32.0, "scale: the update is lora_alpha / r times the product")
    target_modules: str | tuple[str, ...] = key("all-linear", "all-linear: the matrices of the text's layers; a list: "
        "names of modules, as q_proj, a tower's too; else a pattern of whole names")  # fmt: skip
    use_rslora: bool = key(False, "lora_alpha / sqrt(r) instead")
    merge: bool = key(False, "save the merged model too, beside the adapters")


@dataclass(frozen=True)
class Adapted:
    """Keys of the types that can train adapters."""

    lora: Lora | None = key(None, "train adapters, and a new head; {} has all defaults")


@dataclass(frozen=True)
class Generating(Adapted):
    """Keys of the types whose models write text."""

    router_aux_loss_coef: float = key(0.0, "weight of the load balancing of experts")
    router_z_loss_coef: float = key(0.0, "weight of the mean of routers' logsumexp(logits)^2")
    router_capacity_factor: float | None = key(None, "in training an expert takes this many times its even share of a "
        "row's tokens, and later ones are dropped; default: it takes all", positive=True)  # fmt: skip

    @property
    def routers(self) -> dict[str, Any]:
        """The weights of routers' losses that are not 0, by their keys."""
        every = {"router_aux_loss_coef": self.router_aux_loss_coef, "router_z_loss_coef": self.router_z_loss_coef}
        return {name: x for name, x in every.items() if x}


def balanced(k: Generating, total: Callable) -> Callable:
    """Add routers' losses to an objective of completions."""
    coefs = k.router_aux_loss_coef, k.router_z_loss_coef
    told = k.routers or k.router_capacity_factor is not None
    return losses.completions.with_balance(total, *coefs) if told else total


@dataclass(frozen=True)
class Synced:
    """Keys of the types whose reference may follow the model."""

    sync_ref_model: bool = key(False, "let the reference follow the model (TR-DPO)")
    ref_model_mixup_alpha: float = key(0.6, "share of the model in a move of the reference", needs="sync_ref_model")
    ref_model_sync_steps: int = key(512, "steps between two moves of the reference", needs="sync_ref_model")

    @property
    def moves(self) -> tuple[float, int] | None:
        """The model's share in a move of the reference, and the steps between two; None: it stays."""
        return (self.ref_model_mixup_alpha, self.ref_model_sync_steps) if self.sync_ref_model else None


@dataclass(frozen=True)
class Rows:
    """Keys of how texts become rows."""

    completion_only_loss: bool | None = key(None, "learn completions; default: where there are any")
    assistant_only_loss: bool = key(False, "learn what the assistant says")
    packing: bool | None = key(None, "several texts in a row")
    packing_strategy: str = key("bfd", "how texts share rows", choices=("bfd", "bfd_split", "wrapped"))


@dataclass(frozen=True)
class Text(Rows, Generating):
    """Keys of the types whose models learn to write texts."""


def texts(k: Rows) -> dict[str, Any]:
    """Give the data settings of types that learn texts."""
    learn = {None: "auto", True: "completion", False: "all"}[k.completion_only_loss]
    return {"kind": "sft", "learn": "assistant" if k.assistant_only_loss else learn}
