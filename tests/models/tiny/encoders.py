"""Models whose tokens see later ones."""

from .entry import BASE, Entry
from .randomise import formula

ROBERTA = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
               max_position_embeddings=132, type_vocab_size=2, pad_token_id=3, bos_token_id=0, eos_token_id=2)  # fmt: skip


def with_head(model, tokens, states):
    """Put what the head's projection takes in the place of the last state, as fdel does."""
    import torch

    head = model.lm_head
    return (*states[:-1], head.layer_norm(torch.nn.functional.gelu(head.dense(states[-1]))))


def gidd(weights, config, tokens):
    """Write GIDD's published torch code (GiddForDiffusionLM) down as a formula, in float64."""
    import torch

    w, c = {k: x.double() for k, x in weights.items()}, config
    d, n, eps = c["hidden_size"], c["num_attention_heads"], 1e-6
    add, cap = c["resid_scale"] / c["num_hidden_layers"], c["attn_soft_cap"]
    norm = lambda x, name: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * (1 + w[name + ".weight"])
    positions = torch.arange(tokens.shape[1], dtype=torch.float64)
    angle = positions[:, None] / 10000.0 ** (torch.arange(0, d // n, 2) / (d // n))
    split = lambda x: x.unflatten(-1, (n, -1)).transpose(1, 2)

    def linear(x, name):
        scale = {"fan_in": x.shape[-1] ** -0.5, "fan_out": len(w[name + ".weight"]) ** -0.5}
        return x @ w[name + ".weight"].T * scale.get(c["weight_scaling"], c["weight_scaling"]) + w.get(
            name + ".bias", 0
        )

    def turn(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(c["num_hidden_layers"]):
        name = f"model.layers.{i}."
        h = norm(x, name + "attn_layernorm")
        q, k, v = (linear(h, f"{name}self_attn.{part}_proj") for part in "qkv")
        if c["use_qk_norm"]:
            q, k = norm(q, name + "self_attn.q_norm"), norm(k, name + "self_attn.k_norm")
        q, k, v = turn(split(q)), turn(split(k)), split(v)
        if c["attention_bias"]:
            first = lambda part, name=name: w[f"{name}self_attn.{part}_bias"][None, :, None].expand(
                len(tokens), -1, -1, -1
            )
            k, v = torch.cat([first("k"), k], 2), torch.cat([first("v"), v], 2)
        s = cap * torch.tanh(q @ k.mT * (d // n) ** -0.5 / cap)
        x = x + add * linear((s.softmax(-1) @ v).transpose(1, 2).flatten(2), name + "self_attn.o_proj")
        h = linear(norm(x, name + "mlp_layernorm"), name + "mlp.up_proj").relu() ** 2
        x = x + add * linear(h, name + "mlp.down_proj")
    x = norm(x, "model.norm")
    return (
        x @ w["model.embed_tokens.weight"].T
        if c["tie_word_embeddings"]
        else x @ w["lm_head.weight"].T * c["head_scaling"]
    )


GIDD = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
GIDD |= dict(resid_scale=16.0, attn_soft_cap=2.0, weight_scaling="fan_in", use_qk_norm=True, attention_bias=True,
             mlp_bias=False, tie_word_embeddings=False, head_scaling=0.5)  # fmt: skip

TINY = {
    "roberta": Entry("RobertaConfig", ROBERTA, "RobertaForMaskedLM", wiring=True, causal=False, states=with_head),
    # Without padding among its tokens, which the positions of a step cannot count.
    "roberta:causal": Entry("RobertaConfig", ROBERTA | dict(is_decoder=True, type_vocab_size=3, pad_token_id=1,
                       hidden_act="relu"), "RobertaForCausalLM", states=with_head),
    "gidd": Entry("", GIDD, "", causal=False, make=formula("gidd", gidd)),
    "gidd:no_slot": Entry("", GIDD | dict(attention_bias=False, use_qk_norm=False, mlp_bias=True, weight_scaling=1.0,
                     resid_scale=2.0, tie_word_embeddings=True), "", causal=False, make=formula("gidd", gidd)),
    "gidd:fan_out": Entry("", GIDD | dict(weight_scaling="fan_out"), "", causal=False, make=formula("gidd", gidd)),
}  # fmt: skip
