"""Falcon-H1 (arXiv:2507.22448): attention and a Mamba-2 mixer side by side in every layer, each step with a multiplier."""

from typing import Any

import numpy as np

from fdel import ops
from fdel.models import builders, config, mamba2, sublayers

MODEL_TYPE, ARCHITECTURE = "falcon_h1", "FalconH1ForCausalLM"
MIXER = {
    "num_heads": "mamba_n_heads", "state_size": "mamba_d_state", "n_groups": "mamba_n_groups", "head_dim": "mamba_d_head",
    "conv_kernel": "mamba_d_conv", "chunk_size": "mamba_chunk_size", "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias", "time_step_limit": "time_step_limit",
}  # fmt: skip


def mixer(d: dict) -> mamba2.Config:
    """Read the sizes of the mixers; mamba_d_ssm is their width, and their heads' size may be "auto"."""
    embed, heads, inner, expand = (d[key] for key in ("hidden_size", "mamba_n_heads", "mamba_d_ssm", "mamba_expand"))
    inner = expand * embed if inner is None else inner
    own = {key: d[name] for key, name in MIXER.items() if d.get(name) is not None}
    own |= {"head_dim": inner // heads} if own.get("head_dim", "auto") == "auto" else {}
    own |= {"hidden_size": embed, "expand": inner / embed, "intermediate_size": inner, "hidden_act": d["hidden_act"]}
    try:
        return config.from_hf(mamba2.Config, own | {"layer_norm_epsilon": d["rms_norm_eps"]})
    except config.ConfigError as e:
        raise config.ConfigError(f"mamba_* (under Mamba-2's names): {e}") from e


def scales(key: str, count: int) -> Any:
    """Declare a field of so many multipliers, each 1 where config.json leaves them out."""

    def read(d: dict) -> tuple[float, ...]:
        found = tuple(map(float, d.get(key) or [1.0] * count))
        if len(found) != count:
            raise config.ConfigError(f"config field {key!r}: found {len(found)} numbers, expected {count}")
        return found

    return config.computed(read, lambda v: {key: list(v)})


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab=128000, embed=4096, ffn=14336, layers=32, heads=32, kv_heads=8, norm_eps=1e-5, max_positions=8192,
        mamba_d_ssm=1024, mamba_n_heads=128, mamba_n_groups=1, mamba_d_state=256, mamba_expand=2,
    )  # fmt: skip
    ONLY = {"num_logits_to_keep": config.ANY}
    mixer: mamba2.Config = config.computed(
        mixer, lambda m: {MIXER[k]: v for k, v in m.to_hf().items() if k in MIXER} | {"mamba_d_ssm": m.inner}
    )
    mixer_norm: bool = config.hf("mamba_rms_norm", False)
    norm_first: bool = config.hf("mamba_norm_before_gate", True)
    attn_bias: bool = config.hf("attention_bias", False)
    mlp_bias: bool = config.hf("mlp_bias", False)
    out_bias: bool = config.hf("projectors_bias", False)
    embed_scale: float = config.hf("embedding_multiplier", 1.0)
    logit_scale: float = config.hf("lm_head_multiplier", 1.0)
    key_scale: float = config.hf("key_multiplier", 1.0)
    attn_in: float = config.hf("attention_in_multiplier", 1.0)
    attn_out: float = config.hf("attention_out_multiplier", 1.0)
    mixer_in: float = config.hf("ssm_in_multiplier", 1.0)
    mixer_out: float = config.hf("ssm_out_multiplier", 1.0)
    mlp_scales: tuple[float, ...] = scales("mlp_multipliers", 2)
    mixer_scales: tuple[float, ...] = scales("ssm_multipliers", 5)


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    mixer = mamba2.mixer_spec(cfg.mixer, name + "mamba.", out_bias=cfg.out_bias)
    layer = {
        "mixer_in_norm": builders.norm(name + "input_layernorm.weight", cfg.embed),
        **builders.gqa(name + "self_attn.", cfg, biased=cfg.attn_bias),
        "ssm": {k: p for k, p in mixer.items() if cfg.mixer_norm or k != "mixer_norm"},
        "mlp_norm": builders.norm(name + "pre_ff_layernorm.weight", cfg.embed),
        **builders.glu(name + "feed_forward.", cfg.embed, cfg.ffn, biased=cfg.mlp_bias),
    }
    return builders.decoder(cfg, layer, last="model.final_layernorm")


def state_spec(cfg: Config, *, pages: int, page: int = 64, rows: int) -> ops.State:
    """Declare what serving must remember: each layer has both pages and recurrent slots."""
    kv = builders.kv_pages(cfg.layers, cfg.kv_heads, cfg.head_dim, pages=pages, page=page)
    return ops.State(kv, mamba2.mixer_slots(cfg.mixer, cfg.layers, rows))


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    rot, mask, m = ops.rotation(cfg.rope, batch), ops.Mask(cfg.head_dim**-0.5), cfg.mixer
    turn = lambda q, k: (ops.rope(q, rot), ops.rope(k * cfg.key_scale, rot))
    act = lambda x: ops.ACTIVATIONS[cfg.act](x * cfg.mlp_scales[0])
    z, x, b, c, dt = cfg.mixer_scales
    parts = z, x, np.repeat((b, c), m.groups * m.state), dt

    def block(x, carry, p, layer):
        h = ops.rms_norm(x, p["mixer_in_norm"], cfg.norm_eps)
        y, carry = mamba2.mix(h * cfg.mixer_in, carry, p["ssm"], layer, m, batch, parts, not cfg.norm_first)
        a, carry = sublayers.attention(h * cfg.attn_in, carry, p, layer, batch, mask, turn)
        x = x + (y * cfg.mixer_out + a * cfg.attn_out)
        h = ops.glu(ops.rms_norm(x, p["mlp_norm"], cfg.norm_eps), p, act)
        return x + h * cfg.mlp_scales[1], carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat, scale=cfg.embed_scale)


head, forward = builders.head, builders.forward(hidden)
