"""Programs of what hears and what speaks, compiled for accelerators: Whisper's, a talker's step, a vocoder's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from aot_programs import target
from jax.sharding import NamedSharding, PartitionSpec
from tiny import speaking, whisper

from fdel import aot, models, ops, params
from fdel.models import code2wav, qwen3_omni_talker
from fdel.models import whisper as hearing
from fdel.ops import platform
from fdel.serve import speech
from fdel.serve.hear import decode
from fdel.serve.hear.tokens import Tokens

ROWS, PAGES = 4, 2
TOKENS = Tokens(whisper.START, whisper.END, whisper.NO_TIMES, whisper.NO_SPEECH, whisper.PREVIOUS)


def shapes(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def vocoder() -> tuple[Callable, tuple]:
    """Samples of a chunk of frames."""
    cfg = code2wav.Config.from_hf(speaking.VALUES)
    return partial(code2wav.decode, cfg=cfg), (_weights(code2wav, cfg), shapes(1, 32, cfg.books))


def talker() -> tuple[Callable, tuple]:
    """A frame of codes behind the one before."""
    family = qwen3_omni_talker
    cfg = family.Config.from_hf(speaking.VALUES)
    state = params.abstract(family.state_spec(cfg, pages=PAGES, page=64), jnp.bfloat16)
    batch = ops.Paged(shapes(1), shapes(1, PAGES), shapes(1), 1)

    def step(weights, x, batch, state, seen):
        return speech.advance(family, weights, x, batch, state, seen, 1.05, cfg)

    x = shapes(1, cfg.embed, dtype=jnp.bfloat16)
    return step, (_weights(family, cfg), x, batch, state, shapes(cfg.vocab, dtype=jnp.bool_))


def hear() -> tuple[Callable, tuple]:
    """Windows encoded, their prompts read, and some tokens of each written."""
    cfg = hearing.Config.from_hf(whisper.VALUES)
    numbers = [shapes(ROWS, dtype=d) for d in (jnp.int32, jnp.bool_, jnp.float32, jnp.int32)]

    def run(weights, features, tokens, length, start, *how):
        model = models.Model(hearing, cfg, weights)
        memory = hearing.remember(weights, hearing.encode(weights, features, cfg))
        slots = decode.begin(model, memory, decode.Prompt(tokens, length, start), decode.How(*how), TOKENS)
        return decode.write(model, memory, slots, jnp.int32(16), TOKENS)

    features = shapes(ROWS, cfg.bins, 2 * cfg.states, dtype=jnp.bfloat16)
    return run, (_weights(hearing, cfg), features, shapes(ROWS, 8), shapes(ROWS), shapes(ROWS), *numbers)


def _weights(family: Any, cfg: Any) -> Any:
    return params.abstract(params.unstack(family.spec(cfg)), jnp.bfloat16)


def compiled(what: Callable[[], tuple[Callable, tuple]], chip: str) -> aot.Compiled:
    """Compile one of these for one device."""
    on = target(chip, 1)
    mesh = params.make_mesh({}, aot.devices(on))
    whole = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    with platform.tracing_for(on.facts.platform):
        program, args = what()
        return aot.compile(on, jax.jit(program), *jax.tree.map(whole, args), mesh=mesh)
