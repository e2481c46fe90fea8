"""GLM-5 (arXiv:2602.15763): DeepSeek-V3's function, each query attending to the keys that an indexer chooses."""

from dataclasses import replace

import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config, deepseek_v3, glm4_moe_lite, sublayers
from fdel.models.deepseek_v3 import DENSE, rename

MODEL_TYPE, ARCHITECTURE = "glm_moe_dsa", "GlmMoeDsaForCausalLM"
FULL, SHARED = "full", "shared"  # layers with an indexer, and those that take the choice of the one before
__all__ = ["ARCHITECTURE", "MODEL_TYPE", "Config", "forward", "head", "hidden", "rename", "spec", "state_spec"]
EPS = 1e-6  # of the norm of index keys


def kinds(d: dict) -> tuple[tuple[str, str], ...]:
    """Read (indexer, feed-forward) of each layer: indexer_types, a pattern, or every index_topk_freq-th has an indexer."""
    n, pattern, offset = d["num_hidden_layers"], d.get("index_topk_pattern"), d.get("index_skip_topk_offset", 2)
    every = max(d.get("index_topk_freq", 1), 1)
    found = [SHARED if max(i - offset + 1, 0) % every else FULL for i in range(n)]
    if d.get("indexer_types") is None and pattern is not None:
        d = d | {"indexer_types": [{"F": FULL, "S": SHARED}.get(c, c) for c in pattern]}
    found = config.layer_types(d, found, (FULL, SHARED), "indexer_types")
    if found[:1] != (FULL,):
        raise config.ConfigError(f"config field 'indexer_types': found {config.show(found)}, expected {FULL} first")
    return tuple(zip(found, glm4_moe_lite.kinds(d), strict=True))


@config.config
class Config(glm4_moe_lite.Config):
    """Sizes and constants, under DeepSeek-V3's names."""

    DEFAULTS = dict(
        vocab=154880, embed=6144, ffn=12288, layers=78, heads=64, max_positions=202752, rope_dim=64, moe_ffn=2048,
        experts=256, q_latent=2048, v_dim=256, nope_dim=192, groups=1, topk_groups=1, norm_eps=1e-5,
        first_k_dense_replace=3,
    )  # fmt: skip
    ONLY = deepseek_v3.Config.ONLY | {
        "mlp_bias": config.ANY, "layer_types": config.ANY, "indexer_rope_interleave": True
    }  # fmt: skip
    q_latent: int = config.hf("q_lora_rank", 2048)
    index_top_k: int = config.hf("index_topk", 2048)
    index_dim: int = config.hf("index_head_dim", 128)
    index_heads: int = config.hf("index_n_heads", 32)
    kinds: tuple[tuple[str, str], ...] = config.computed(
        kinds, lambda k: glm4_moe_lite.kinds_to_hf(tuple(f for _, f in k)) | {"indexer_types": [i for i, _ in k]}
    )


def index_spec(cfg: Config, name: str) -> dict:
    """Declare the indexer: queries from the latent of attention's, one key per token, a weight per head."""
    heads, latent = ("index_heads", cfg.index_heads), ("q_latent", cfg.q_latent)
    weights = builders.matrix(name + "weights_proj.weight", ("embed", cfg.embed), heads)
    return {
        "index_q": builders.heads_out(name + "wq_b.weight", heads, cfg.index_dim, latent),
        "index_k": builders.matrix(name + "wk.weight", ("embed", cfg.embed), ("head_dim", cfg.index_dim)),
        **builders.layer_norm("index_norm", name + "k_norm", cfg.index_dim, "head_dim"),
        "index_weights": replace(weights, dtype="float32"),
    }


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    index = {FULL: index_spec(cfg, name + "self_attn.indexer."), SHARED: {}}
    moe = deepseek_v3.moe_spec(cfg, name + "mlp.")
    layer = lambda kind: (
        builders.prenorm(name, cfg.embed) | deepseek_v3.attention_spec(cfg, name + "self_attn.") | index[kind[0]]
        | (builders.glu(name + "mlp.", cfg.embed, cfg.ffn) if kind[1] == DENSE else moe)
    )  # fmt: skip
    return builders.decoder(cfg, layer)


def state_spec(cfg: Config, *, pages: int, page: int = 64, rows: int = 0) -> ops.State:
    """Declare what serving must remember: latents of every layer, and index keys of those with an indexer."""
    count = sum(kind == FULL for kind, _ in cfg.kinds)
    pools = (cfg.layers, cfg.latent + cfg.rope_dim), (count, cfg.index_dim)
    return ops.State(tuple(builders.latent_pages(*sizes, pages=pages, page=page) for sizes in pools))


def index(h, p, cfg: Config, rot):
    """Compute queries [... heads head_dim], key and weights of the indexer; their first channels are rotated."""
    turn = lambda x: jnp.concatenate([ops.rope_interleaved(x[..., : cfg.rope_dim], rot), x[..., cfg.rope_dim :]], -1)
    q = ops.einsum("...r,nhr->...nh", deepseek_v3.query_latent(h, p), p["index_q"])
    k = sublayers.layer_norm(ops.einsum("...d,hd->...h", h, p["index_k"]), p, "index_norm", EPS)
    weights = ops.einsum("...d,nd->...n", h, p["index_weights"], out_dtype=jnp.float32)
    return turn(q), turn(k[..., None, :])[..., 0, :], weights


@builders.hidden("router")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    rot, mask = ops.rotation(cfg.rope, batch), ops.Mask(cfg.scale)
    full = {kind for kind in cfg.kinds if kind[0] == FULL}
    norm = lambda x, w: ops.rms_norm(x, w, cfg.norm_eps)

    def block(kind):
        def apply(x, carry, p, layer):
            h = norm(x, p["attn_norm"])

            def attend(batch, carry, layer, q, kv, w_k, w_v, *, mask):
                if kind[0] == FULL:
                    place, of = ops.pool_index(cfg.kinds, full, layer), index(h, p, cfg, rot)
                    chosen, carry = ops.choose_keys(batch, carry, 1, place, *of, count=cfg.index_top_k)
                    carry = replace(carry, kept=chosen)
                return ops.sparse_mla(batch, carry, 0, layer, q, kv, w_k, w_v, carry.kept, scale=mask.scale)

            a, carry = deepseek_v3.attention(h, carry, p, layer, cfg, batch, rot, mask, attend)
            y, carry = sublayers.sigmoid_experts(norm(x + a, p["mlp_norm"]), carry, p, cfg, batch)
            return x + a + y, carry

        return apply

    carry = replace(carry, kept=ops.none_chosen(batch, carry, cfg.index_top_k))
    return sublayers.walk(params, tokens, cfg, {kind: block(kind) for kind in sorted(set(cfg.kinds))}, carry, remat)


head, forward = builders.head, builders.forward(hidden)
