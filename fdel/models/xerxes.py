"""Xerxes (EasyDeL, github.com/erfanzar/EasyDeL): sandwich norms and experts, or queries and keys normalised and neither."""

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.models.config import FULL, SLIDING

MODEL_TYPE, ARCHITECTURE = "xerxes", "XerxesForCausalLM"
NEAR, CAP = 4096, 30.0  # window of every other layer, bound of the logits


@config.config
class Config(config.Decoder):
    """Sizes and constants; names and defaults are EasyDeL's."""

    DEFAULTS = dict(
        vocab=256128, embed=4096, ffn=16384, layers=32, heads=32, kv_heads=8, head_dim=144, max_positions=16384
    )
    ONLY = {"layer_types": config.ANY}  # follows from the others
    act: str = config.computed(
        lambda d: "silu" if d.get("swish_run") else "gelu_pytorch_tanh", lambda a: {"swish_run": a == "silu"}
    )
    routed: bool = config.hf("xe_moe", True)
    qk_norm: bool = config.hf("xe_kvnorm", False)
    mlp_norm: bool = config.hf("xe_mlpnorm", False)
    experts: int = config.hf("num_local_experts", 4)
    top_k: int = config.hf("num_experts_per_tok", 2)
    every: int | None = config.hf("window_pattern", None)
    window: int | None = config.hf("sliding_window", None)

    plain = property(lambda self: self.qk_norm and not self.routed)
    sandwich = property(lambda self: not self.plain or self.mlp_norm)
    softcap = property(lambda self: None if self.plain else CAP)
    scaled = property(lambda self: not self.qk_norm or self.mlp_norm)  # embeddings by the root of their size

    @property
    def kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        """The attention of each layer."""
        if self.every is not None:
            return tuple(SLIDING if (i + 1) % self.every else FULL for i in range(self.layers))
        return tuple(FULL if self.qk_norm or i % 2 else SLIDING for i in range(self.layers))


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    norm = lambda part: builders.norm(f"{name}{part}_layernorm.weight", cfg.embed)
    first = {"attn_norm": norm("input"), **builders.gqa(name + "self_attn.", cfg)}
    first |= builders.qk_norm(name + "self_attn.", cfg) if cfg.qk_norm else {}
    if cfg.sandwich:
        first |= {"attn_post_norm": norm("post_attention"), "mlp_post_norm": norm("post_feedforward")}
    first["mlp_norm"] = norm("pre_feedforward" if cfg.sandwich else "post_attention")
    ffn = builders.glu(name + "mlp.", cfg.embed, cfg.ffn)
    layer = first | (builders.moe(name + "mlp.", cfg.embed, cfg.ffn, cfg.experts) if cfg.routed else ffn)
    return builders.decoder(cfg, layer)


@builders.hidden("attention", "router")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    rot, norm = ops.rotation(cfg.rope, batch), lambda x, w: ops.rms_norm(x, w, cfg.norm_eps)
    after = lambda x, p, part: norm(x, p[part]) if cfg.sandwich else x

    def block(window):
        mask = ops.Mask(cfg.head_dim**-0.5, window=window)

        def apply(x, carry, p, layer):
            h, change = norm(x, p["attn_norm"]), sublayers.normed(norm, p, rot)
            a, carry = sublayers.attention(h, carry, p, layer, batch, mask, change)
            x = x + after(a, p, "attn_post_norm")
            y, carry = sublayers.softmax_experts(norm(x, p["mlp_norm"]), carry, p, cfg, batch, normalize=True)
            return x + after(y, p, "mlp_post_norm"), carry

        return apply

    blocks = {FULL: block(None), SLIDING: block(NEAR if cfg.every is None else cfg.window)}
    scale = cfg.embed**0.5 if cfg.scaled else None
    return sublayers.walk(params, tokens, cfg, blocks, carry, remat, scale=scale)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
