"""A policy and its reference as one model: softmax((1 - share) * policy's logits + share * reference's).

That is the geometric mixture of both, from which Nash-MD (arXiv:2312.00886) samples; with share=1 it is the reference. This
module is a family (`models.protocol`) whose Config holds another's: what serves a model serves the mixture, with a cache
for each of the two, in one call. Params are the policy's, with the reference's beside them.

    model = models.Model(mixture, mixture.Config(llama, cfg, 0.5), {**policy, "reference": reference})
    engine = Engine(model, settings)
"""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel import ops
from fdel.ops.weights import dense

MODEL_TYPE, ARCHITECTURE = "mixture", "Mixture"


@dataclass(frozen=True)
class Config:
    """The family and Config of both models, and the reference's share; all else is asked of that Config."""

    family: ModuleType
    of: Any
    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share={self.share}; expected a number from 0, the policy, to 1, the reference")
        if self.family.state_spec(self.of, pages=1, rows=1).slots is not None:
            raise ValueError(f"{self.family.MODEL_TYPE} keeps recurrent state; a mixture has keys and values alone")

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "of"), name)


def spec(cfg: Config) -> dict[str, Any]:
    """Declare every array: the policy's, and the reference's under "reference"."""
    return {**cfg.family.spec(cfg.of), "reference": cfg.family.spec(cfg.of)}


def state_spec(cfg: Config, *, pages: int, page: int = 64, rows: int = 0) -> ops.State:
    """Declare the caches: the policy's pools of pages, then the reference's."""
    one = cfg.family.state_spec(cfg.of, pages=pages, page=page, rows=rows).pages
    pools = one if isinstance(one, tuple) else (one,)
    return ops.State((*pools, *pools))


def hidden(
    params: Any, tokens: Array, cfg: Config, batch: ops.Batch | None = None, state: ops.State | None = None,
    taps: ops.Taps | None = None, *, remat: str | None = None,
) -> tuple[Float[Array, "... D2"], ops.State | None, None]:  # fmt: skip
    """Compute both models' final hidden states, one after the other in the last axis, each times its share."""
    if taps is not None:
        raise ValueError("a mixture has no taps; look at its two models")
    if batch is not None and batch.rotary is not None and not getattr(cfg.family.hidden, "rotary", False):
        batch = replace(batch, rotary=None)
    both, pages = [], list[Any]()
    several = state is not None and isinstance(cfg.family.state_spec(cfg.of, pages=1, rows=1).pages, tuple)
    for i, (weights, share) in enumerate(((params, 1 - cfg.share), (params["reference"], cfg.share))):
        mine: Any = None
        seen = _seen(batch, i)
        if state is not None:
            pools: Any = state.pages
            half = pools[i * len(pools) // 2 : (i + 1) * len(pools) // 2]
            mine = ops.State(half if several else half[0])
        x, new, _ = cfg.family.hidden(weights, tokens, cfg.of, seen, mine, None, remat=remat)
        both.append(x * share)
        pages += [] if new is None else new.pages if several else [new.pages]
    return jnp.concatenate(both, -1), ops.State(tuple(pages)) if pages else None, None


# What asks how a family sees finds this, as `builders.hidden` says it. Of models that turn tokens by their positions alone
# `rotary` is these positions, and is left out.
hidden.taps, hidden.rotary = (), True  # type: ignore[attr-defined]
hidden.ahead = lambda cfg: cfg.family.hidden.ahead(cfg.of)  # type: ignore[attr-defined]


def _seen(batch: ops.Batch | None, side: int) -> ops.Batch | None:
    """Give a model what its own tower has given: entries are those of both, one after the other in the last axis."""
    if batch is None or batch.media is None or batch.media.values is None:
        return batch
    half = batch.media.values.shape[-1] // 2
    values = batch.media.values[..., side * half : (side + 1) * half]
    return replace(batch, media=replace(batch.media, values=values))


def encode(params: Any, inputs: Any, cfg: Config) -> Array:
    """Compute what stands in the place of images and sounds: the policy's, then the reference's, in the last axis."""
    mine, theirs = (cfg.family.encode(p, inputs, cfg.of) for p in (params, params["reference"]))
    return jnp.concatenate([mine, theirs], -1)


def head(params: Any, cfg: Config) -> ops.Head:
    """Give the output projection of both; ValueError where logits are no linear function of hidden states."""
    mine, theirs = cfg.family.head(params, cfg.of), cfg.family.head(params["reference"], cfg.of)
    if mine.softcap is not None:
        raise ValueError(f"{cfg.family.MODEL_TYPE} caps its logits (softcap={mine.softcap}): they cannot be mixed so")
    bias = None if mine.bias is None else (1 - cfg.share) * mine.bias + cfg.share * theirs.bias
    weight = jnp.concatenate([dense(mine.weight), dense(theirs.weight)], -1)
    return ops.Head(weight, scale=mine.scale, bias=bias)


def forward(
    params: Any, tokens: Array, cfg: Config, batch: ops.Batch | None = None, state: ops.State | None = None
) -> tuple[Float[Array, "... V"], ops.State | None]:
    """Compute float32 logits, up to a constant of each token's: (logits, state)."""
    x, state, _ = hidden(params, tokens, cfg, batch, state)
    return ops.logits(x, head(params, cfg)), state
