"""GIDD (arXiv:2503.04482, 2512.10858): denoises masked and random tokens, bidirectional, with scaled linear maps."""

import math
from typing import Any

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.models.config import ANY
from fdel.params.spec import Param, zeros

MODEL_TYPE, ARCHITECTURE = "gidd", "GiddForDiffusionLM"
FANS = ("fan_in", "fan_out")


def factor(key: str, default: str | float):
    """Declare a field that scales linear maps: by a number, or by the root of their inputs or outputs."""

    def read(d: dict) -> str | float:
        value = d.get(key, default)
        if value in FANS or (isinstance(value, float | int) and math.isfinite(value)):
            return value
        found = f"found {config.show(value)}, understood are a number, {' and '.join(map(repr, FANS))}"
        raise config.ConfigError(f"config field {key!r}: {found}")

    return config.computed(read, lambda value: {key: value})


@config.config
class Config(config.Decoder):
    """Sizes and constants; the last fields are of the noise that it was trained on, see `ops.diffusion`."""

    DEFAULTS = dict(vocab=131072, embed=768, ffn=3072, layers=12, heads=12, max_positions=1024)
    ONLY = {
        "is_causal": False, "num_key_value_heads": lambda c: c.heads, "head_dim": lambda c: c.embed // c.heads,
        "hidden_act": "relu2",
        **dict.fromkeys(("init_scale", "emb_init_scale", "head_init_scale", "attn_performer"), ANY),
    }  # fmt: skip
    act: str = config.act(default="relu2")
    score_cap: float = config.hf("attn_soft_cap", 30.0)
    resid_scale: float = config.hf("resid_scale", 4.0)
    qk_norm: bool = config.hf("use_qk_norm", True)
    slot: bool = config.hf("attention_bias", False)
    mlp_bias: bool = config.hf("mlp_bias", False)
    scaling: str | float = factor("weight_scaling", "fan_in")
    head_scaling: float = config.hf("head_scaling", 1.0)
    noise_type: float = config.hf("noise_type", 0.0)
    min_log_snr: float = config.hf("min_log_snr", -9.0)
    max_log_snr: float = config.hf("max_log_snr", 9.0)

    logit_scale = property(lambda self: 1.0 if self.tied else self.head_scaling)


def spec(cfg: Config) -> dict:
    """Declare every array; norm scales are stored around zero."""
    name, d = "model.layers.{layers}.", cfg.embed
    heads = ("heads head_dim", (cfg.heads, cfg.head_dim), zeros)
    layer = {
        "attn_norm": builders.bias(name + "attn_layernorm.weight", d),
        **builders.gqa(name + "self_attn.", cfg),
        "mlp_norm": builders.bias(name + "mlp_layernorm.weight", d),
        **builders.mlp(name + "mlp.", d, cfg.ffn, ("up_proj", "down_proj"), biased=cfg.mlp_bias),
    }
    for part in "qk" if cfg.qk_norm else "":
        layer[f"{part}_norm"] = Param(*heads, f"{name}self_attn.{part}_norm.weight", "(heads head_dim)")
    for part in "kv" if cfg.slot else "":
        layer[f"{part}_slot"] = Param(*heads, f"{name}self_attn.{part}_bias")
    return builders.decoder(cfg, layer, norm=builders.bias)


def state_spec(cfg: Config, *, pages: int, page: int = 64, rows: int = 0) -> ops.State:
    """Declare what serving remembers: nothing, since tokens see later ones."""
    return ops.State()


@builders.hidden()
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    rot, mask = ops.rotation(cfg.rope, batch), ops.Mask(cfg.head_dim**-0.5, causal=False, softcap=cfg.score_cap)
    turn, add = sublayers.rotate(rot), cfg.resid_scale / cfg.layers
    norm = lambda x, weight: ops.rms_norm(x, weight, cfg.norm_eps, offset=1.0)
    whole = lambda x, weight: norm(x.reshape(*x.shape[:-2], -1), weight.reshape(-1)).reshape(x.shape)

    def linear(subscripts, x, p, part, fan_in, fan_out):
        scales: dict[str | float, Any] = {"fan_in": fan_in**-0.5, "fan_out": fan_out**-0.5}
        y = ops.einsum(subscripts, x, p[part]) * scales.get(cfg.scaling, cfg.scaling)
        return y + p[f"{part}_bias"].astype(y.dtype) if f"{part}_bias" in p else y

    def block(x, carry, p, layer):
        h = norm(x, p["attn_norm"])
        q, k, v = (linear("...d,nhd->...nh", h, p, i, cfg.embed, cfg.embed) for i in "qkv")
        q, k = turn(whole(q, p["q_norm"]), whole(k, p["k_norm"])) if cfg.qk_norm else turn(q, k)
        if cfg.slot:
            a = ops.attend_slot(batch, q, k, v, (p["k_slot"], p["v_slot"]), mask=mask)
        else:
            a, carry = ops.attend(batch, carry, layer, q, k, v, mask=mask)
        x = x + add * linear("...nh,dnh->...d", a, p, "o", cfg.embed, cfg.embed)
        h = linear("...d,fd->...f", norm(x, p["mlp_norm"]), p, "up", cfg.embed, cfg.ffn)
        return x + add * linear("...f,df->...d", ops.ACTIVATIONS[cfg.act](h), p, "down", cfg.ffn, cfg.embed), carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat, lambda x: norm(x, params["norm"]))


head, forward = builders.head, builders.forward(hidden)
