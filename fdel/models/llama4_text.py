"""Llama 4, text (Meta, 2025): attention in chunks, each fourth layer global without positions; experts of scaled inputs."""

import jax
import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config, sublayers

MODEL_TYPE, ARCHITECTURE = "llama4_text", "Llama4ForCausalLM"
FULL, CHUNKED = config.FULL, "chunked_attention"


def kinds(d: dict) -> tuple[tuple[str, bool, bool], ...]:
    """Read (attention, whether rotated, whether with experts) of each layer."""
    n, every, step = d["num_hidden_layers"], d.get("no_rope_layer_interval", 4), d.get("interleave_moe_layer_step", 1)
    rotated = d.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(n)]
    moe = d.get("moe_layers")
    moe = range(step - 1, n, step) if moe is None else moe
    attention = config.layer_types(d, [CHUNKED if r else FULL for r in rotated[:n]], (FULL, CHUNKED))
    return tuple((a, bool(r), i in moe) for i, (a, r) in enumerate(zip(attention, rotated[:n], strict=True)))


def kinds_to_hf(kinds: tuple) -> dict:
    """Write layer_types, no_rope_layers and moe_layers."""
    moe = [i for i, (_, _, m) in enumerate(kinds) if m]
    return {"layer_types": [a for a, _, _ in kinds], "no_rope_layers": [int(r) for _, r, _ in kinds], "moe_layers": moe}


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab=202048, embed=5120, ffn=8192, layers=48, heads=40, kv_heads=8, head_dim=128, norm_eps=1e-5,
        max_positions=131072, rope_theta=5e5,
    )  # fmt: skip
    ONLY = dict(for_llm_compressor=False)
    dense_ffn: int = config.hf("intermediate_size_mlp", 16384)
    experts: int = config.hf("num_local_experts", 16)
    top_k: int = config.hf("num_experts_per_tok", 1)
    attn_bias: bool = config.hf("attention_bias", False)
    qk_norm: bool = config.hf("use_qk_norm", True)
    chunk: int | None = config.hf("attention_chunk_size", 8192)
    tuned: bool = config.computed(  # files of the first weeks say 4
        lambda d: bool(d.get("attn_temperature_tuning", True)), lambda t: {"attn_temperature_tuning": t}
    )
    floor: int = config.hf("floor_scale", 8192)
    sharpness: float = config.hf("attn_scale", 0.1)
    jitter: float = config.hf("router_jitter_noise", 0.0)  # of training, which transformers does not read
    kinds: tuple[tuple[str, bool, bool], ...] = config.computed(kinds, kinds_to_hf)


def moe_spec(cfg: Config, name: str) -> dict:
    """Declare router, experts and the shared expert; the file holds matrices [in, out], gate beside up."""
    e, f, d = cfg.experts, cfg.ffn, cfg.embed
    experts = builders.fused_experts(name + "experts.", d, f, e, inputs_first=True)
    router = builders.matrix(name + "router.weight", ("embed", d), ("experts", e))
    return {"router": router, "experts": experts, "shared": builders.glu(name + "shared_expert.", d, f)}


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    ffn = {
        True: moe_spec(cfg, name + "feed_forward."),
        False: builders.glu(name + "feed_forward.", cfg.embed, cfg.dense_ffn),
    }
    layer = lambda kind: {
        **builders.prenorm(name, cfg.embed),
        **builders.gqa(name + "self_attn.", cfg, biased=cfg.attn_bias),
        **ffn[kind[2]],
    }
    return builders.decoder(cfg, layer)


@builders.hidden("attention", "router")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    turn, act = sublayers.rotate(ops.rotation(cfg.rope, batch), interleaved=True), ops.ACTIVATIONS[cfg.act]
    norm = lambda x, w=None: ops.rms_norm(x, w, cfg.norm_eps)
    # Of global layers: later queries are sharper, 1 + sharpness ln(1 + floor((position + 1) / floor)).
    sharper = 1 + cfg.sharpness * jnp.log1p(jnp.floor((batch.positions + 1.0) / cfg.floor))[..., None, None]

    def local(q, k):
        q, k = turn(q, k)
        return (norm(q), norm(k)) if cfg.qk_norm else (q, k)

    def distant(q, k):
        return (q * sharper).astype(q.dtype) if cfg.tuned else q, k

    def moe(h, carry, p):
        seen, carry = ops.jittered(h, carry)
        logits = ops.einsum("...d,ed->...e", seen, p["router"], out_dtype=jnp.float32)
        top, experts = jax.lax.top_k(logits, cfg.top_k)
        carry = ops.watch_router(batch, carry, logits, jax.nn.softmax(logits), experts)
        experts, carry = ops.limited(batch, carry, experts, cfg.experts)
        y = ops.moe(h, p["experts"], jax.nn.sigmoid(top), experts, act, scale_inputs=True)
        return y + ops.glu(h, p["shared"], act), carry

    def block(attention, rotated, experts):
        mask = ops.Mask(cfg.head_dim**-0.5, chunk=cfg.chunk if attention == CHUNKED else None)

        def apply(x, carry, p, layer):
            h, change = norm(x, p["attn_norm"]), local if rotated else distant
            a, carry = sublayers.attention(h, carry, p, layer, batch, mask, change)
            h = norm(x + a, p["mlp_norm"])
            y, carry = moe(h, carry, p) if experts else (ops.glu(h, p, act), carry)
            return x + a + y, carry

        return apply

    blocks = {kind: block(*kind) for kind in sorted(set(cfg.kinds))}
    return sublayers.walk(params, tokens, cfg, blocks, carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
