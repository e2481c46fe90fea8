"""OpenELM (arXiv:2404.14619): Llama's block with normalised queries and keys; later layers have more heads and units."""

import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.models.config import ANY

MODEL_TYPE, ARCHITECTURE = "openelm", "OpenELMForCausalLM"
EPS = 1e-6  # of RMSNorm


def kinds(d: dict) -> tuple[tuple[int, int, int], ...]:
    """Read what each layer has: heads, key heads, hidden units (a multiple of ffn_dim_divisor, at most a tenth too few)."""
    n, size, by = d["num_transformer_layers"], d["model_dim"], d["ffn_dim_divisor"]
    read, names = [], ("num_query_heads", "num_kv_heads", "ffn_multipliers")
    for name, kind in zip(names, (int, int, int | float), strict=True):
        values = d[name]
        number = lambda x, kind=kind: isinstance(x, kind) and not isinstance(x, bool) and 0 < x <= 2**20
        if not isinstance(values, list) or len(values) != n or not all(map(number, values)):
            found = f"found {config.show(values)}, expected {n} positive numbers, one per layer"
            raise config.ConfigError(f"config field {name!r}: {found}")
        read.append(values)
    units = [max(by, int(m * size + by / 2) // by * by) for m in read[2]]
    units = [u + by if u < 0.9 * m * size else u for u, m in zip(units, read[2], strict=True)]
    if any(heads % kv for heads, kv in zip(*read[:2], strict=True)):
        found = f"found {config.show(read[0])}, no multiples of num_kv_heads"
        raise config.ConfigError(f"config field 'num_query_heads': {found}")
    return tuple(zip(*read[:2], units, strict=True))


@config.config
class Config:
    """Sizes and constants; `hf(...)` names each one's key in config.json."""

    ONLY = {
        "ffn_with_glu": True, "normalization_layer_name": "rms_norm",
        **dict.fromkeys(("qkv_multipliers", "num_gqa_groups", "rope_max_length"), ANY),
    }  # fmt: skip
    vocab: int = config.hf("vocab_size", 32000)
    embed: int = config.hf("model_dim", 2048)
    layers: int = config.hf("num_transformer_layers", 12)
    head_dim: int = config.hf("head_dim", 128)
    groups: int = config.hf("ffn_dim_divisor", 256)
    act: str = config.act("activation_fn_name", "swish")
    qk_norm: bool = config.hf("normalize_qk_projections", True)
    max_positions: int = config.hf("max_context_length", 2048)
    tied: bool = config.hf("share_input_output_layers", True)
    theta: float = config.hf("rope_freq_constant", 10000.0)
    kinds: tuple[tuple[int, int, int], ...] = config.computed(
        kinds, lambda k: {"num_query_heads": [x[0] for x in k], "num_kv_heads": [x[1] for x in k]}
    )

    def to_hf(self) -> dict:
        """Write config.json."""
        return config.to_hf(self) | {"ffn_multipliers": [units / self.embed for *_, units in self.kinds]}

    heads = property(lambda self: max(heads for heads, *_ in self.kinds))
    kv_heads = property(lambda self: max(kv for _, kv, _ in self.kinds))  # of the cache, empty in layers with fewer


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name, d, h = "transformer.layers.{layers}.", cfg.embed, cfg.head_dim

    def layer(kind: tuple[int, int, int]) -> dict:
        heads, kv, units = kind
        sides = {"q": ("heads head_dim", (heads, h))} | {i: ("kv_heads head_dim", (kv, h)) for i in "kv"}
        return {
            "attn_norm": builders.norm(name + "attn_norm.weight", d),
            **builders.fused(name + "attn.qkv_proj.weight", ("embed", d), **sides),
            **(builders.qk_norm(name + "attn.", cfg) if cfg.qk_norm else {}),
            "o": builders.heads_in(name + "attn.out_proj.weight", heads, h, d),
            "mlp_norm": builders.norm(name + "ffn_norm.weight", d),
            **builders.gate_up(name + "ffn.proj_1.weight", d, units, name + "ffn.proj_2.weight"),
        }

    return builders.decoder(cfg, layer, "transformer.token_embeddings", "transformer.norm")


def attend(batch, carry, layer, q, k, v, mask, kv_heads):
    """Attend, in a Paged call with heads of zeros up to the number of those in the cache."""
    n, have = q.shape[-2], k.shape[-2]
    if isinstance(batch, ops.Paged) and have < kv_heads:
        grow = lambda x, to: jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, to - x.shape[-2]), (0, 0)])
        q, k, v = grow(q, n // have * kv_heads), grow(k, kv_heads), grow(v, kv_heads)
    a, carry = ops.attend(batch, carry, layer, q, k, v, mask=mask)
    return a[..., :n, :], carry


@builders.hidden()
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    rot, mask = ops.rotation(ops.Rope(cfg.head_dim, cfg.theta), batch), ops.Mask(cfg.head_dim**-0.5)
    norm = lambda x, scale: ops.rms_norm(x, scale, EPS)

    def block(x, carry, p, layer):
        h = norm(x, p["attn_norm"])
        q, k, v = (ops.einsum("...d,nhd->...nh", h, p[i]) for i in "qkv")
        q, k = sublayers.normed(norm, p, rot)(q, k)
        a, carry = attend(batch, carry, layer, q, k, v, mask, cfg.kv_heads)
        x = x + ops.einsum("...nh,dnh->...d", a, p["o"])
        return x + ops.glu(norm(x, p["mlp_norm"]), p, ops.ACTIVATIONS[cfg.act]), carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat, lambda x: norm(x, params["norm"]))


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
