"""Qwen3-Next: three gated delta-rule layers (arXiv:2412.06464) to one gated softmax-attention layer, and a sparse MoE."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config
from fdel.params.spec import Param, layers, normal, ones, parts, stack

MODEL_TYPE, ARCHITECTURE = "qwen3_next", "Qwen3NextForCausalLM"
LINEAR, FULL = "linear_attention", "full_attention"


def kinds(d: dict) -> tuple[tuple[str, str], ...]:
    """Read (mixer, feed-forward) of each layer; every fourth mixer is full attention unless layer_types says otherwise."""
    n, every = d["num_hidden_layers"], d.get("full_attention_interval", 4)
    mixers = config.layer_types(d, [FULL if (i + 1) % every == 0 else LINEAR for i in range(n)], (LINEAR, FULL))
    step, dense = d.get("decoder_sparse_step", 1), d.get("mlp_only_layers") or []
    sparse = [i not in dense and d.get("num_experts", 512) > 0 and (i + 1) % step == 0 for i in range(n)]
    return tuple((m, "moe" if s else "dense") for m, s in zip(mixers, sparse, strict=True))


def kinds_to_hf(kinds: tuple) -> dict:
    """Write layer_types and mlp_only_layers."""
    dense = [i for i, (_, f) in enumerate(kinds) if f == "dense"]
    return {"layer_types": [m for m, _ in kinds], "mlp_only_layers": dense, "decoder_sparse_step": 1}


def partial(d: dict) -> float:
    """Read the rotated share of each head."""
    return (d.get("rope_parameters") or {}).get("partial_rotary_factor", d.get("partial_rotary_factor", 0.25))


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and constants; `hf(...)` names each one's key in config.json."""

    vocab: int = config.hf("vocab_size", 151936)
    embed: int = config.hf("hidden_size", 2048)
    ffn: int = config.hf("intermediate_size", 5632)
    layers: int = config.hf("num_hidden_layers", 48)
    heads: int = config.hf("num_attention_heads", 16)
    kv_heads: int = config.hf("num_key_value_heads", 2)
    head_dim: int = config.hf("head_dim", 256)
    key_heads: int = config.hf("linear_num_key_heads", 16)
    value_heads: int = config.hf("linear_num_value_heads", 32)
    key_dim: int = config.hf("linear_key_head_dim", 128)
    value_dim: int = config.hf("linear_value_head_dim", 128)
    kernel: int = config.hf("linear_conv_kernel_dim", 4)
    experts: int = config.hf("num_experts", 512)
    top_k: int = config.hf("num_experts_per_tok", 10)
    moe_ffn: int = config.hf("moe_intermediate_size", 512)
    shared_ffn: int = config.hf("shared_expert_intermediate_size", 512)
    normalize: bool = config.hf("norm_topk_prob", True)
    norm_eps: float = config.hf("rms_norm_eps", 1e-6)
    act: str = config.hf("hidden_act", "silu", choices=tuple(ops.ACTIVATIONS))
    max_positions: int = config.hf("max_position_embeddings", 32768)
    tied: bool = config.hf("tie_word_embeddings", False)
    kinds: tuple[tuple[str, str], ...] = config.computed(kinds, kinds_to_hf)
    partial: float = config.computed(partial, lambda v: {"partial_rotary_factor": v})
    rope: ops.Rope = config.computed(
        lambda d: config.rope(d | {"partial_rotary_factor": partial(d)}, d.get("head_dim", 256)),
        lambda r: {"rope_parameters": config.rope_to_hf(r)},
    )
    source: str = config.source()

    from_hf = classmethod(config.from_hf)
    to_hf = config.to_hf

    @property
    def rep(self) -> int:
        """Value heads per key head."""
        return self.value_heads // self.key_heads


def linear_spec(cfg: Config, name: str) -> dict:
    """Declare a gated delta-rule mixer; the file interleaves q, k, v, z (and b, a) per key head."""
    d, g, r, k, v = cfg.embed, cfg.key_heads, cfg.rep, cfg.key_dim, cfg.value_dim
    channels = 2 * g * k + g * r * v
    qkvz, ba = parts(q=k, k=k, v=r * v, z=r * v), parts(beta=r, decay=r)

    def heads(axes: str, shape: tuple, file: str, part: tuple) -> Param:
        return Param(f"heads {axes} embed", (g, *shape, d), normal(0.02), name + file, f"(heads [{axes}]) embed", part)

    narrow = lambda part: heads("head_dim", (k,), "in_proj_qkvz.weight", qkvz[part])
    wide = lambda part: heads("rep head_dim", (r, v), "in_proj_qkvz.weight", qkvz[part])
    gate = lambda part: heads("rep", (r,), "in_proj_ba.weight", ba[part])
    per_head = lambda part, init: Param("heads rep", (g, r), init, name + part, "(heads rep)", dtype="float32")
    return {
        "q": narrow("q"), "k": narrow("k"), "v": wide("v"), "z": wide("z"), "beta": gate("beta"), "decay": gate("decay"),
        "conv": builders.conv(name + "conv1d.weight", channels, cfg.kernel),
        "rate": per_head("A_log", builders.decay_init), "step": per_head("dt_bias", ones),
        "mixer_norm": builders.norm(name + "norm.weight", v, "head_dim"),
        "o": Param("embed heads rep head_dim", (d, g, r, v), normal(0.02), name + "out_proj.weight",
                   "embed (heads rep head_dim)"),
    }  # fmt: skip


def full_spec(cfg: Config, name: str) -> dict:
    """Declare gated attention; the file holds query and gate of each head side by side."""
    query = parts(q=cfg.head_dim, gate=cfg.head_dim)
    spec = builders.gqa(name, cfg.embed, cfg.heads, cfg.kv_heads, cfg.head_dim)
    q = lambda part: replace(spec["q"], hf_axes="(heads [head_dim]) embed", part=query[part])
    return spec | {
        "q": q("q"), "q_gate": q("gate"),
        "q_norm": builders.bias(name + "q_norm.weight", cfg.head_dim, "head_dim"),
        "k_norm": builders.bias(name + "k_norm.weight", cfg.head_dim, "head_dim"),
    }  # fmt: skip


def ffn_spec(cfg: Config, kind: str, name: str) -> dict:
    """Declare a dense feed-forward, or routed experts beside a gated shared one."""
    if kind == "dense":
        return {"ffn": builders.glu(name, cfg.embed, cfg.ffn)}
    embed = ("embed", cfg.embed)
    expert = builders.glu(name + "experts.{experts}.", cfg.embed, cfg.moe_ffn)
    return {
        "router": builders.matrix(name + "gate.weight", embed, ("experts", cfg.experts)),
        "experts": stack(expert, "experts", range(cfg.experts)),
        "shared": builders.glu(name + "shared_expert.", cfg.embed, cfg.shared_ffn),
        "shared_gate": Param("embed", (cfg.embed,), normal(0.02), name + "shared_expert_gate.weight", "1 embed"),
    }


def spec(cfg: Config) -> dict:
    """Declare every array; norm scales are stored around zero, except the delta mixer's."""
    name = "model.layers.{layers}."
    mixers = {LINEAR: linear_spec(cfg, name + "linear_attn."), FULL: full_spec(cfg, name + "self_attn.")}

    def layer(kind):
        return {
            "mixer_in_norm": builders.bias(name + "input_layernorm.weight", cfg.embed),
            **mixers[kind[0]],
            "ffn_norm": builders.bias(name + "post_attention_layernorm.weight", cfg.embed),
            **ffn_spec(cfg, kind[1], name + "mlp."),
        }

    top = {
        "embed": builders.embedding("model.embed_tokens.weight", cfg.vocab, cfg.embed),
        "layers": layers(layer, cfg.kinds),
        "norm": builders.bias("model.norm.weight", cfg.embed),
    }
    return top if cfg.tied else top | {"head": builders.head("lm_head.weight", cfg.vocab, cfg.embed)}


def rename(name: str, cfg: Config) -> str | None:
    """Map file names to spec names: multi-token-prediction weights are not part of the model."""
    return None if name.startswith("mtp.") else name


def state_spec(cfg: Config, *, pages: int, page: int = 64, rows: int) -> dict:
    """Declare what serving must remember: pages of the full layers, recurrent slots of the linear ones."""
    full = sum(mixer == FULL for mixer, _ in cfg.kinds)
    conv = (2 * cfg.key_heads * cfg.key_dim + cfg.value_heads * cfg.value_dim, cfg.kernel - 1)
    ssm = (cfg.value_heads, cfg.key_dim, cfg.value_dim)
    return {
        "pages": builders.kv_pages(full, cfg.kv_heads, cfg.head_dim, pages=pages, page=page),
        "slots": builders.slots(cfg.layers - full, conv, ssm, rows=rows),
    }


def delta(h, slots, p, layer, cfg: Config, batch):
    """Mix by the gated delta rule: short convolution, unit-length q and k, decay and write strength from the input."""
    q, k = (ops.einsum("...d,ghd->...gh", h, p[i]) for i in "qk")
    v, z = (ops.einsum("...d,grhd->...grh", h, p[i]) for i in "vz")
    b, a = (ops.einsum("...d,grd->...gr", h, p[i]) for i in ("beta", "decay"))
    flat = lambda x: x.reshape(*h.shape[:-1], -1)
    mixed, slots = ops.causal_conv(batch, slots, layer, jnp.concatenate([flat(q), flat(k), flat(v)], -1), p["conv"])
    keys = cfg.key_heads * cfg.key_dim
    q, k, v = jnp.split(jax.nn.silu(mixed), (keys, 2 * keys), -1)
    heads = lambda x, n: x.reshape(*h.shape[:-1], n, -1)
    q, k = (jnp.repeat(ops.l2norm(heads(x, cfg.key_heads)), cfg.rep, -2) for x in (q, k))
    g = -jnp.exp(p["rate"].astype(jnp.float32)) * jax.nn.softplus(a.astype(jnp.float32) + p["step"].astype(jnp.float32))
    o, slots = ops.gated_delta_rule(
        batch, slots, layer, q * cfg.key_dim**-0.5, k, heads(v, cfg.value_heads), flat(g), jax.nn.sigmoid(flat(b))
    )
    o = ops.rms_norm(o.reshape(z.shape), p["mixer_norm"], cfg.norm_eps)
    o = (o.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))).astype(h.dtype)
    return ops.einsum("...grh,dgrh->...d", o, p["o"]), slots


def hidden(params, tokens, cfg: Config, batch: ops.Batch | None = None, state=None, *, remat: str | None = None):
    """Compute the final normalised hidden states: tokens int[B T] (Packed) or int[T] (Paged) -> [..., embed], state."""
    batch = ops.packed(tokens) if batch is None else batch
    rot, mask, act = ops.rotation(cfg.rope, batch), ops.Mask(cfg.head_dim**-0.5), ops.ACTIVATIONS[cfg.act]
    norm = lambda x, w: ops.rms_norm(x, w, cfg.norm_eps, offset=1.0)
    index = lambda mixer, layer: ops.pool_index(tuple(m for m, _ in cfg.kinds), {mixer}, layer)

    def linear(h, state, p, layer):
        y, slots = delta(h, ops.pool(state, "slots"), p, index(LINEAR, layer), cfg, batch)
        return y, ops.with_pool(state, "slots", slots)

    def full(h, state, p, layer):
        q = ops.rope(norm(ops.einsum("...d,nhd->...nh", h, p["q"]), p["q_norm"]), rot)
        k = ops.rope(norm(ops.einsum("...d,khd->...kh", h, p["k"]), p["k_norm"]), rot)
        v = ops.einsum("...d,khd->...kh", h, p["v"])
        a, pages = ops.attend(batch, ops.pool(state, "pages"), index(FULL, layer), q, k, v, mask=mask)
        a = a * jax.nn.sigmoid(ops.einsum("...d,nhd->...nh", h, p["q_gate"]))
        return ops.einsum("...nh,dnh->...d", a, p["o"]), ops.with_pool(state, "pages", pages)

    def dense(h, state, p):
        return ops.glu(h, p["ffn"], act), state

    def moe(h, state, p):
        logits = ops.einsum("...d,ed->...e", h, p["router"], out_dtype=jnp.float32)
        weights, experts = ops.route_softmax(logits, cfg.top_k, normalize=cfg.normalize)
        state = ops.watch_router(batch, state, jax.nn.softmax(logits), experts)
        gate = jax.nn.sigmoid(ops.einsum("...d,d->...", h, p["shared_gate"]))[..., None]
        return ops.moe(h, p["experts"], weights, experts, act) + gate * ops.glu(h, p["shared"], act), state

    def block(kind):
        mixer, ffn = linear if kind[0] == LINEAR else full, moe if kind[1] == "moe" else dense

        def apply(x, state, p, layer):
            y, state = mixer(norm(x, p["mixer_in_norm"]), state, p, layer)
            x = x + y
            y, state = ffn(norm(x, p["ffn_norm"]), state, p)
            return x + y, state

        return apply

    x = ops.embed(params["embed"], tokens)
    blocks = {kind: block(kind) for kind in sorted(set(cfg.kinds))}
    x, state = ops.layers(blocks, x, state, params["layers"], cfg.kinds, remat=remat)
    return norm(x, params["norm"]), state


def head(params, cfg: Config) -> ops.Head:
    """The output projection, for `ops.logits` and the chunked losses."""
    return ops.Head(params["head"] if "head" in params else params["embed"])


def forward(params, tokens, cfg: Config, batch: ops.Batch | None = None, state=None):
    """Compute logits: tokens int[B T] with Packed (the default), int[T] with Paged -> (float32 [..., V], state)."""
    x, state = hidden(params, tokens, cfg, batch, state)
    return ops.logits(x, head(params, cfg)), state
