"""Say an answer: a thinker's states become a talker's inputs, its frames of codes a vocoder's samples. A plain loop.

The order of the talker's inputs, and what it may draw, are Qwen3-Omni's (arXiv:2509.17765, section 2), as transformers'
`generate(return_audio=True)` has them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fdel import ops
from fdel import params as P
from fdel.models import Model
from fdel.serve.engine.step import PAGE, mesh_of, on_mesh

HEADER = 3  # tokens before an answer: what begins a turn, the role, the end of a line
SPECIAL = 1024  # tokens at the end of a talker's vocabulary that are no codes


class Opening(NamedTuple):
    """What a talker begins with, and what its frames are given, one after the other."""

    inputs: Float[Array, "T D"]  # what users said, showed and played, and the answer's first token
    following: Float[Array, "rest D"]  # the answer's other tokens, and its end: one is added to each frame
    pad: Float[Array, " D"]  # added to frames behind those


def users(tokens: Sequence[int], cfg: Any) -> tuple[np.ndarray, int]:
    """Find the places of all users' turns in a prompt, and that where the last answer's turn begins.

    `cfg` is a talker's. ValueError for a prompt that does not ask for an answer.
    """
    ids = np.asarray(tokens)
    begin = np.maximum.accumulate(np.where(ids == cfg.turn_token, np.arange(len(ids)), -1)).clip(0)
    role = ids[np.minimum(begin + 1, len(ids) - 1)]
    answers = np.flatnonzero((ids[:-1] == cfg.turn_token) & (ids[1:] == cfg.assistant_token))
    if not len(answers) or answers[-1] + HEADER > len(ids):
        found = f"found no turn of token {cfg.assistant_token} behind {cfg.turn_token} at its end"
        raise ValueError(f"prompt: {found}; render it with add_generation_prompt")
    return np.flatnonzero(role == cfg.user_token), int(answers[-1])


def opening(
    talker: Model, table: Any, embeddings: Float[Array, "T E"], states: Float[Array, "T E"], prompt: Sequence[int],
    voice: int, media: Bool[np.ndarray, " T"] | None = None,
) -> Opening:  # fmt: skip
    """Make a talker's inputs of a thinker's: `table` embeds its tokens, `embeddings` and `states` are of prompt and answer.

    Where `media` stand in the prompt the talker gets states, elsewhere embeddings. `voice` is the talker's token of the
    speaker. The answer's last token, which ends it, is not said.
    """
    p, cfg, act = talker.params, talker.cfg, ops.ACTIVATIONS[talker.cfg.text.act]
    said, begin = users(prompt, cfg)
    text = lambda x: ops.mlp(x, p["from_text"], act)
    asked = text(embeddings[said])
    if media is not None and media[said].any():
        asked = jnp.where(media[said][:, None], ops.mlp(states[said], p["from_states"], act), asked)
    answer = text(embeddings[begin:-1])
    pad, bos, eos = text(ops.embed(table, jnp.array([cfg.pad_token, cfg.bos_token, cfg.eos_token])))
    codes = jnp.array([cfg.nothink, cfg.think_bos, cfg.think_eos, voice, cfg.pad, cfg.bos])
    first = jnp.stack([pad, pad, pad, pad, bos, answer[HEADER]]) + ops.embed(p["embed"], codes)
    return Opening(
        jnp.concatenate([asked, answer[:HEADER], first]), jnp.concatenate([answer[HEADER + 1 :], eos[None]]), pad
    )


def turns(rotary: Int[np.ndarray, "T 3"], said: np.ndarray, length: int) -> Int[np.ndarray, "length 3"]:
    """Give time, row and column of a talker's inputs: of what users said as the thinker has them, without gaps; then on."""
    out, start = [np.zeros((0, 3), int)], 0
    for run in np.split(said, np.flatnonzero(np.diff(said) > 1) + 1):
        out.append(rotary[run] - rotary[run].min() + start)
        start = out[-1].max() + 1
    rest = length - len(said)
    return np.concatenate([*out, np.repeat(start + np.arange(rest)[:, None], 3, 1)])


def advance(
    family: Any, params: Any, x: Float[Array, "T D"], batch: ops.Paged, state: ops.State, seen: Bool[Array, " V"],
    penalty: float, cfg: Any,
) -> tuple[Int[Array, " books"], Float[Array, " D"], ops.State, Bool[Array, " V"]]:  # fmt: skip
    """Draw a talker's most probable frame behind some inputs: (codes, their embedding, state, codes that were drawn)."""
    h, state = family.hidden(params, x, cfg, batch, state)
    logits, places = ops.logits(h[-1:], family.head(params, cfg))[0], jnp.arange(cfg.vocab)
    logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    allowed = (places < cfg.vocab - SPECIAL) | (places == cfg.eos)
    first = jnp.argmax(jnp.where(allowed, logits, -jnp.inf)).astype(jnp.int32)
    codes = family.predict_codes(params, h[-1:], first[None], cfg)[0]
    return codes, family.frame(params, codes, cfg), state, seen.at[first].set(True)


def speak(
    thinker: Model, talker: Model, vocoder: Model, prompt: Sequence[int], answer: Sequence[int], *, speaker: str = "ethan",
    max_frames: int = 4096, penalty: float = 1.05, batch: ops.Packed | None = None,
) -> tuple[Int[np.ndarray, "frames books"], Float[np.ndarray, " samples"]]:  # fmt: skip
    """Say what a thinker answered: frames of codes, greedily, and samples from -1 to 1 (Qwen3-Omni: 24,000 a second).

    All three models come out of one checkpoint. `answer` are the tokens that the thinker wrote, with the one that ended it.
    `batch` is of prompt and answer, one row: it brings media and their positions. First codes that were drawn before are
    less probable by the factor `penalty`. At most `max_frames` are drawn, the last of which is not heard.
    ValueError for an unknown speaker, and where prompt or answer do not fit.
    """
    cfg, family, names = talker.cfg, talker.family, dict(talker.cfg.speakers)
    if speaker.lower() not in names:
        raise ValueError(f"speaker: found {speaker!r}, expected one of {', '.join(names)}")
    if cfg.thinker != thinker.cfg.embed or cfg.place > thinker.cfg.layers:
        found = f"found states of {thinker.cfg.embed} numbers after {thinker.cfg.layers} layers"
        raise ValueError(f"thinker: {found}, expected {cfg.thinker} numbers, after layer {cfg.place}")
    said, begin = users(prompt, cfg)
    if len(prompt) + len(answer) < begin + HEADER + 2:
        raise ValueError("answer: found less than two tokens; the last one, which ends it, is not said")
    tokens = jnp.asarray([[*prompt, *answer]], jnp.int32)
    batch = ops.packed(tokens) if batch is None else batch
    watched = ops.Taps(hidden=ops.HiddenStates((0, cfg.place)))
    last, _, taps = jax.jit(on_mesh(mesh_of(thinker.params), thinker.family.hidden), static_argnums=2)(
        thinker.params, tokens, thinker.cfg, batch, None, watched
    )
    embeddings, states = taps.hidden.values
    states = last if cfg.place == thinker.cfg.layers else states
    media = None if batch.media is None else np.asarray(batch.media.index[0] >= 0)
    begun = opening(talker, thinker.params["embed"], embeddings[0], states[0], prompt, names[speaker.lower()], media)
    length, pages = len(begun.inputs), -(-(len(begun.inputs) + max_frames) // PAGE)
    mesh = mesh_of(talker.params)
    kept = P.spread(family.state_spec(cfg, pages=pages, page=PAGE), mesh)
    state = jax.tree.map(lambda p: jnp.zeros(p.shape, begun.inputs.dtype), kept)
    where = ops.Paged(jnp.arange(length), jnp.arange(pages)[None], jnp.zeros(1, int), length)
    if batch.rotary is not None:
        where = replace(where, rotary=jnp.asarray(turns(np.asarray(batch.rotary[0]), said, length)))
    run = jax.jit(on_mesh(mesh, advance), static_argnames=("family", "cfg"), donate_argnames="state")
    x, seen, frames = begun.inputs, jnp.zeros(cfg.vocab, bool), list[np.ndarray]()
    for i in range(max_frames):
        codes, x, state, seen = run(family, talker.params, x, where, state, seen, penalty, cfg=cfg)
        if int(codes[0]) == cfg.eos:
            break
        frames.append(np.asarray(codes))
        x = (x + (begun.following[i] if i < len(begun.following) else begun.pad))[None]
        rotary = None if where.rotary is None else where.rotary[-1:] + 1
        where = ops.Paged(where.positions[-1:] + 1, where.page_table, where.rows, 1, rotary=rotary)
    else:
        frames = frames[:-1]
    if not frames:
        return np.zeros((0, cfg.books), np.int32), np.zeros(0, np.float32)
    every = np.stack(frames)
    return every, np.asarray(vocoder.family.waveform(vocoder.params, every[None], vocoder.cfg)[0])
