"""What a model family is: the names that fdel reads of its module and of its Config, and the check of a user's own."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar, Protocol

from jaxtyping import Array, Float, Int

from fdel import ops
from fdel.models.keys import ConfigError

Tokens = Int[Array, "..."]  # int[B T] with a Packed batch, int[T] with a Paged one


class Config(Protocol):
    """What is read of every family's Config, a frozen dataclass. Its other fields are between it and its own file.

    Also read where they are there: `heads` (of attention weights and FLOPs), `experts` and `top_k` (of routers),
    `jitter` (noise on what routers read in training, see `train.route`), `max_positions` (the longest sequence, no limit
    without it), `width` (of the final hidden states, where it is not `embed`), and by `builders.head` `logit_scale` and
    `softcap`.
    """

    vocab: int
    embed: int
    layers: int
    source: str  # the original config.json

    @classmethod
    def from_hf(cls, d: Mapping[str, Any]) -> "Config":
        """Read the dict of a config.json; ConfigError for what is not understood."""

    def to_hf(self) -> dict[str, Any]:
        """Write the dict of a config.json, without model_type and architectures."""


class Family(Protocol):
    """A module with these names is a model family.

    It may also have `rename(name, cfg) -> str | None`: the spec's name of a tensor in a file, or None to leave it out; and
    `of_file(cfg, names) -> Config`: the Config for a file with tensors of these names, where config.json does not tell.

    A family that sees or hears has encode(params, inputs, cfg) -> [*rows entries D] or [*rows entries parts D]: what stands
    in the place of tokens, in the weights' dtype, computed of `ops.Media.inputs` (`ops.Patches` for sight); and gives it
    to `builders.hidden`. Its spec has the arrays of towers and projectors beside those of the language model.
    """

    __name__: str
    MODEL_TYPE: str
    ARCHITECTURE: str
    Config: ClassVar[type[Any]]

    def spec(self, cfg: Any) -> dict[str, Any]:
        """Declare every array once: a tree of `params.Param`, with "embed" and "layers" at its top."""

    def state_spec(self, cfg: Any, *, pages: int, page: int = 64, rows: int = 0) -> ops.State:
        """Declare what serving remembers: `pages` pages of `page` tokens, and slots of `rows` sequences."""

    def hidden(
        self, params: Any, tokens: Tokens, cfg: Any, batch: ops.Batch | None = None, state: ops.State | None = None,
        taps: ops.Taps | None = None, *, remat: str | None = None,
    ) -> tuple[Float[Array, "... D"], ops.State | None, ops.Taps | None]:  # fmt: skip
        """Compute the final normalised hidden states, everything but the output projection: (x, state, taps).

        Without a batch each row is one sequence. A Paged call needs and returns state; a Packed one returns its taps.
        `remat` names what a backward pass saves of a layer (`ops.layers`). What a call cannot give is a ValueError.
        `builders.hidden` makes it.
        """

    def head(self, params: Any, cfg: Any) -> ops.Head:
        """Give the output projection."""

    def forward(
        self, params: Any, tokens: Tokens, cfg: Any, batch: ops.Batch | None = None, state: ops.State | None = None
    ) -> tuple[Float[Array, "... V"], ops.State | None]:
        """Compute float32 logits by `hidden` and the output projection: (logits, state). `builders.forward` makes it."""


CONFIG = ("vocab", "embed", "layers", "source", "from_hf", "to_hf")
MODULE = dict.fromkeys(("MODEL_TYPE", "ARCHITECTURE"), "a string") | {"Config": "a frozen dataclass"}
MODULE |= dict.fromkeys(("spec", "state_spec", "hidden", "head", "forward"), "a function, see protocol.Family")


def check(module: Any) -> ModuleType:
    """Give a module back as a family; a ConfigError names all that it lacks."""
    lacking = [f"{name} ({what})" for name, what in MODULE.items() if not hasattr(module, name)]
    config = getattr(module, "Config", None)
    fields = {*getattr(config, "__dataclass_fields__", ()), *dir(config)}
    lacking += [f"Config.{name}" for name in CONFIG if config is not None and name not in fields]
    if lacking:
        name, found = getattr(module, "__name__", module), ", ".join(lacking)
        raise ConfigError(f"{name!r} is no model family: it lacks {found}; see fdel.models.protocol.Family")
    return module
