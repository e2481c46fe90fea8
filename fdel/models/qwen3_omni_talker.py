"""Qwen3-Omni's talker (arXiv:2509.17765): Qwen3-MoE with a shared expert, over frames of codes and what a thinker says.

It draws the first code of each frame, and a small decoder below it, the code predictor, the others, one after the other.
It is no `protocol.Family`: load it of a whole checkpoint by `models.load(path, family=qwen3_omni_talker)`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel import ops
from fdel.models import builders, config, qwen2_vl, qwen3, qwen3_moe
from fdel.models.keys import ANY, ConfigError, mapping, show
from fdel.models.qwen3_next import ffn_spec
from fdel.ops.carry import begin
from fdel.ops.rope import Rope
from fdel.params.spec import stack

MODEL_TYPE, ARCHITECTURE = "qwen3_omni_talker", "Qwen3OmniMoeForConditionalGeneration"
PART = "talker_config"  # of a config.json
# Keys that say what the thinker's tokens are, or how its positions are counted, and those of other parts.
UNREAD = "audio_token_id image_token_id video_token_id vision_start_token_id vision_end_token_id audio_start_token_id "
UNREAD += "audio_end_token_id position_id_per_seconds seconds_per_chunk spatial_merge_size"
OTHERS = "thinker_config code2wav_config enable_audio_output im_end_token_id system_token_id"


@config.config
class Text(qwen3_moe.Config):
    """Sizes and constants of the talker's layers, all of which have experts."""

    DEFAULTS = dict(vocab=3072, embed=1024, ffn=2048, layers=20, heads=16, kv_heads=2, max_positions=32768, moe_ffn=384)
    ONLY = {"mlp_only_layers": [], "decoder_sparse_step": 1}
    shared_ffn: int = config.hf("shared_expert_intermediate_size")
    rope: Rope = qwen2_vl.sections((24, 20, 20), theta=1e4, mrope_interleaved=True)


@config.config
class Predictor(qwen3.Config):
    """Sizes and constants of the code predictor."""

    DEFAULTS = qwen3.Config.DEFAULTS | dict(vocab=2048, embed=1024, ffn=3072, layers=5, heads=16, kv_heads=8)
    ONLY = {"layer_types": lambda cfg: [config.FULL] * cfg.layers}
    books: int = config.hf("num_code_groups", 32)


def part(key: str, cls: Any) -> Any:
    """Declare a field that is a Config of its own, in an object of the talker's."""

    def read(d: dict) -> Any:
        try:
            return cls.from_hf(mapping(key, d.get(f"{PART}.{key}")))
        except ConfigError as e:
            raise ConfigError(f"{PART}.{key}: {e}") from e

    return config.computed(read, lambda cfg: {f"{PART}.{key}": cfg.to_hf()})


def speakers(d: dict) -> tuple[tuple[str, int], ...]:
    """Read the token of each voice."""
    found = mapping(f"{PART}.speaker_id", d.get(f"{PART}.speaker_id"))
    if not all(type(n) is int and n >= 0 for n in found.values()):
        raise ConfigError(f"config field '{PART}.speaker_id': found {show(found)}, expected the token of each name")
    return tuple(sorted(found.items()))


def codec(name: str, default: int) -> Any:
    """Declare a token of the talker's."""
    return config.hf(f"{PART}.codec_{name}", default)


@config.config
class Config:
    """Sizes and constants. A frame has a code of each of `books`: the talker's, and behind it the predictor's."""

    NESTED = (PART,)
    ONLY = dict.fromkeys([*OTHERS.split(), *(f"{PART}.{key}" for key in UNREAD.split())], ANY)
    books: int = config.hf(f"{PART}.num_code_groups", 32)
    thinker: int = config.hf(f"{PART}.thinker_hidden_size", 2048)  # size of the thinker's hidden states
    place: int = config.hf(f"{PART}.accept_hidden_layer", 18)  # of those that stand for what was seen and heard
    eos: int = codec("eos_token_id", 4198)
    nothink: int = codec("nothink_id", 4203)
    think_bos: int = codec("think_bos_id", 4204)
    think_eos: int = codec("think_eos_id", 4205)
    pad: int = codec("pad_id", 4196)
    bos: int = codec("bos_id", 4197)
    turn_token: int = config.hf("im_start_token_id", 151644)  # tokens of the thinker from here on
    user_token: int = config.hf("user_token_id", 872)
    assistant_token: int = config.hf("assistant_token_id", 77091)
    pad_token: int = config.hf("tts_pad_token_id", 151671)
    bos_token: int = config.hf("tts_bos_token_id", 151672)
    eos_token: int = config.hf("tts_eos_token_id", 151673)
    speakers: tuple[tuple[str, int], ...] = config.computed(
        speakers, lambda pairs: {f"{PART}.speaker_id": dict(pairs) or None}
    )
    text: Any = part("text_config", Text)
    predictor: Any = part("code_predictor_config", Predictor)

    vocab = property(lambda self: self.text.vocab)
    embed = property(lambda self: self.text.embed)
    layers = property(lambda self: self.text.layers)

    @classmethod
    def from_hf(cls, d: Mapping[str, Any]) -> "Config":
        """Read the dict of a config.json; ConfigError for parts of different sizes, too."""
        cfg = config.from_hf(cls, d)
        mine, other = (cfg.embed, cfg.books), (cfg.predictor.embed, cfg.predictor.books)
        if mine != other or cfg.books < 2:
            found = f"found hidden sizes and code groups {mine} and {other}"
            raise ConfigError(f"{PART}: {found}, expected the same in both parts, and at least two groups")
        return cfg


def spec(cfg: Config) -> dict[str, Any]:
    """Declare every array: the talker's at the top, the code predictor's below "predictor"."""
    t, file = cfg.text, "model.layers.{layers}."
    below = lambda tree, name: jax.tree.map(lambda p: p.renamed(lambda own: name + own), tree)
    resized = lambda name: {
        "up": builders.matrix(name + "linear_fc1.weight", ("embed", cfg.thinker), ("ffn", t.ffn)),
        "up_bias": builders.bias(name + "linear_fc1.bias", t.ffn, "ffn"),
        "down": builders.matrix(name + "linear_fc2.weight", ("ffn", t.ffn), ("embed", t.embed)),
        "down_bias": builders.bias(name + "linear_fc2.bias", t.embed),
    }
    layer = qwen3.attention_spec(t, file) | ffn_spec(t, qwen3_moe.MOE, file + "mlp.")
    tree = builders.decoder(t, layer, "model.codec_embedding", head="codec_head")
    tree |= {"from_text": resized("text_projection."), "from_states": resized("hidden_projection.")}
    predictor = qwen3.spec(cfg.predictor)
    residual = lambda name: stack(replace(predictor["embed"], hf=name), "groups", range(cfg.books - 1))
    predictor |= {
        "embed": residual("model.codec_embedding.{groups}.weight"),
        "head": residual("lm_head.{groups}.weight"),
    }
    return below(tree | {"predictor": below(predictor, "code_predictor.")}, "talker.")


def rename(name: str, cfg: Config) -> str | None:
    """Leave out the parts that do not speak codes."""
    return name if name.startswith("talker.") else None


def state_spec(cfg: Config, *, pages: int, page: int = 64, rows: int = 0) -> ops.State:
    """Declare what the talker remembers: keys and values of its frames, and of what came before."""
    return builders.kv_state(cfg.text, pages=pages, page=page)


head = builders.head


def hidden(
    params: Any, inputs: Float[Array, "... D"], cfg: Config, batch: ops.Batch | None = None,
    state: ops.State | None = None, *, remat: str | None = None,
) -> tuple[Float[Array, "... D"], ops.State | None]:  # fmt: skip
    """Compute the final normalised states of embeddings, [B T D] with a Packed batch, [T D] with a Paged one: (x, state).

    Embeddings come from `opening`, and for each frame from `frame`. A batch and state are as those of `protocol.Family`.
    """
    batch, carry = begin(jnp.zeros(inputs.shape[:-1], jnp.int32), batch, state, None, (), ("rotary",))
    x, carry = ops.layers(qwen3_moe.block(cfg.text, batch), inputs, carry, params["layers"], remat=remat)
    return ops.rms_norm(x, params["norm"], cfg.text.norm_eps), carry.state


def forward(
    params: Any, inputs: Float[Array, "... D"], cfg: Config, batch: ops.Batch | None = None,
    state: ops.State | None = None,
) -> tuple[Float[Array, "... V"], ops.State | None]:  # fmt: skip
    """Compute float32 logits of each next frame's first code by `hidden`: (logits, state)."""
    x, state = hidden(params, inputs, cfg, batch, state)
    return ops.logits(x, head(params, cfg)), state


def _table(tables: Any, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], tables)


def frame(params: Any, codes: Int[Array, "... books"], cfg: Config) -> Float[Array, "... D"]:
    """Compute the embedding of a frame: the sum of those of its codes."""
    out = ops.embed(params["embed"], codes[..., 0])
    for i in range(cfg.books - 1):
        out = out + ops.embed(_table(params["predictor"]["embed"], i), codes[..., i + 1])
    return out


def _predict(params: Any, x: Array, cfg: Config, batch: ops.Batch, carry: ops.Carry) -> tuple[Array, ops.Carry]:
    p, c = params["predictor"], cfg.predictor
    x, carry = ops.layers(qwen3.blocks(c, batch), x, carry, p["layers"], c.kinds)
    return ops.rms_norm(x, p["norm"], c.norm_eps), carry


def residual_logits(
    params: Any, states: Float[Array, "B D"], codes: Int[Array, "B books"], cfg: Config
) -> Float[Array, "B residual V"]:
    """Compute the code predictor's float32 logits of all codes of a frame but the first, each given those before it.

    `states` are the talker's, `hidden`, of which the frame's first code was drawn.
    """
    p = params["predictor"]
    before = [_table(p["embed"], i) for i in range(cfg.books - 2)]
    inputs = [states, ops.embed(params["embed"], codes[:, 0])]
    inputs += [ops.embed(table, codes[:, i + 1]) for i, table in enumerate(before)]
    x, _ = _predict(params, jnp.stack(inputs, 1), cfg, ops.packed(codes), ops.Carry())
    heads = [ops.Head(_table(p["head"], i)) for i in range(cfg.books - 1)]
    return jnp.stack([ops.logits(x[:, i + 1], head) for i, head in enumerate(heads)], 1)


def largest(logits: Float[Array, "B V"], i: Any) -> Int[Array, " B"]:
    """Draw the most probable code."""
    return jnp.argmax(logits, -1).astype(jnp.int32)


def predict_codes(
    params: Any, states: Float[Array, "B D"], first: Int[Array, " B"], cfg: Config, draw: Callable = largest
) -> Int[Array, "B books"]:
    """Draw the residual codes of a frame one after the other, each given those before it: all codes of the frame.

    `states` as in `residual_logits`, `first` the codes that were drawn of them. draw(logits float32[B V], i) -> int[B]
    gives code i of every row.
    """
    p, rows = params["predictor"], len(first)
    pages = jax.tree.map(
        lambda p: jnp.zeros(p.shape, states.dtype), builders.kv_state(cfg.predictor, pages=rows, page=cfg.books)
    )
    at = lambda positions, block: ops.Paged(positions, jnp.arange(rows)[:, None], jnp.arange(rows), block)
    x = jnp.stack([states, ops.embed(params["embed"], first)], 1).reshape(2 * rows, -1)
    x, carry = _predict(params, x, cfg, at(jnp.tile(jnp.arange(2), rows), 2), ops.Carry(pages))
    second = draw(ops.logits(x[1::2], ops.Head(_table(p["head"], 0))), 1)

    def step(passed: tuple, each: tuple) -> tuple:
        code, carry = passed
        table, head, i = each
        x, carry = _predict(params, ops.embed(table, code), cfg, at(jnp.full(rows, i), 1), carry)
        code = draw(ops.logits(x, ops.Head(head)), i)
        return (code, carry), code

    tables, heads = jax.tree.map(lambda x: x[:-1], p["embed"]), jax.tree.map(lambda x: x[1:], p["head"])
    _, rest = jax.lax.scan(step, (second, carry), (tables, heads, jnp.arange(2, cfg.books)))
    return jnp.concatenate([first[:, None], second[:, None], rest.T], 1)
