"""OpenELM, which transformers has no class of."""

from .entry import Entry
from .randomise import formula


def openelm(weights, config, tokens):
    """Write Apple's published torch code (OpenELMForCausalLM) down as a formula, in float64."""
    import torch

    w, c = {k: x.double() for k, x in weights.items()}, config
    size = c["head_dim"]
    norm = lambda x, name: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w[name + ".weight"]
    angle = torch.arange(tokens.shape[1], dtype=torch.float64)[:, None]
    angle = angle / c["rope_freq_constant"] ** (torch.arange(0, size, 2) / size)
    ahead = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)

    def turn(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    x = w["transformer.token_embeddings.weight"][tokens]
    for i in range(c["num_transformer_layers"]):
        name, heads, kv = f"transformer.layers.{i}.", c["num_query_heads"][i], c["num_kv_heads"][i]
        qkv = norm(x, name + "attn_norm") @ w[name + "attn.qkv_proj.weight"].T
        q, k, v = qkv.unflatten(-1, (heads + 2 * kv, size)).transpose(1, 2).split([heads, kv, kv], 1)
        if c["normalize_qk_projections"]:
            q, k = norm(q, name + "attn.q_norm"), norm(k, name + "attn.k_norm")
        k, v = (y.repeat_interleave(heads // kv, 1) for y in (turn(k), v))
        s = (turn(q) @ k.mT * size**-0.5).masked_fill(ahead, -torch.inf)
        x = x + (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w[name + "attn.out_proj.weight"].T
        gate, up = (norm(x, name + "ffn_norm") @ w[name + "ffn.proj_1.weight"].T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ w[name + "ffn.proj_2.weight"].T
    shared = c["share_input_output_layers"]
    return norm(x, "transformer.norm") @ w["transformer.token_embeddings.weight" if shared else "lm_head.weight"].T


OPENELM = dict(vocab_size=128, model_dim=64, num_transformer_layers=3, head_dim=16, num_query_heads=[4, 4, 8],
               num_kv_heads=[2, 2, 4], ffn_multipliers=[0.5, 0.8, 1.7], ffn_dim_divisor=16, activation_fn_name="swish",
               max_context_length=128, normalize_qk_projections=True, share_input_output_layers=True, ffn_with_glu=True,
               rope_freq_constant=10000, qkv_multipliers=[0.5, 1.0], num_gqa_groups=2)  # fmt: skip
TINY = {
    "openelm": Entry("", OPENELM, "", make=formula("openelm", openelm)),
    "openelm:plain": Entry("", OPENELM | dict(normalize_qk_projections=False, share_input_output_layers=False,
                      num_query_heads=[6, 4, 2], num_kv_heads=[2, 4, 1]), "", make=formula("openelm", openelm)),
}  # fmt: skip
