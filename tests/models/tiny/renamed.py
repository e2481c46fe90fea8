"""Families that transformers lacks and that are Llama under other names; its Llama with renamed weights is the oracle."""

from typing import Any

from .entry import BASE, LLAMA3, Entry
from .randomise import formula

OWN = ("num_hidden_layers", "num_layers", "rms_norm_eps", "layer_norm_epsilon", "activation_function", "bias",
       "model_type", "architectures")  # fmt: skip
SIZES = {k: v for k, v in BASE.items() if k not in OWN}


def llama(weights: dict, config: dict, tokens: Any, layers: int, **values: Any) -> Any:
    """Logits of transformers' Llama with these weights, every one; the model has what `config` says, and `values`."""
    import transformers

    given = {k: v for k, v in config.items() if k not in OWN}
    cfg = transformers.LlamaConfig(**given | values, num_hidden_layers=layers, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(cfg).eval()
    if config.get("tie_word_embeddings"):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model(tokens).logits


def replaced(weights: dict, pairs: tuple[tuple[str, str], ...]) -> dict:
    """Weights under the names that replacing each of `pairs` in turn gives."""
    out = {}
    for name, w in weights.items():
        for theirs, llamas in pairs:
            name = name.replace(theirs, llamas)
        out[name] = w
    return out


def exaone(weights: dict, config: dict, tokens: Any) -> Any:
    """EXAONE 3: names only."""
    names = (
        ("transformer.wte.", "model.embed_tokens."), ("transformer.ln_f.", "model.norm."),
        ("transformer.h.", "model.layers."), ("attn.attention.out_proj", "self_attn.o_proj"),
        ("attn.attention.", "self_attn."), ("ln_1.", "input_layernorm."), ("ln_2.", "post_attention_layernorm."),
        ("c_fc_0", "gate_proj"), ("c_fc_1", "up_proj"), ("c_proj", "down_proj"),
    )  # fmt: skip
    values = dict(rms_norm_eps=config["layer_norm_epsilon"], hidden_act=config["activation_function"])
    return llama(replaced(weights, names), config, tokens, config["num_layers"], **values)


def internlm2(weights: dict, config: dict, tokens: Any) -> Any:
    """InternLM2: of wqkv, each key head has its group of queries, itself and its values, one below the other."""
    import torch

    names = (
        ("model.tok_embeddings.", "model.embed_tokens."), ("output.", "lm_head."),
        ("attention.wo.", "self_attn.o_proj."), ("attention_norm.", "input_layernorm."),
        ("ffn_norm.", "post_attention_layernorm."), ("feed_forward.w1.", "mlp.gate_proj."),
        ("feed_forward.w3.", "mlp.up_proj."), ("feed_forward.w2.", "mlp.down_proj."),
    )  # fmt: skip
    n, kv = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, group, out = config["hidden_size"] // n, n // kv, {}
    for name, w in replaced(weights, names).items():
        if "attention.wqkv." not in name:
            out[name] = w
            continue
        rows = [w[i * head_dim : (i + 1) * head_dim] for i in range(n + 2 * kv)]
        kind = lambda i: "q" if i % (group + 2) < group else "kv"[i % (group + 2) - group]
        for part in "qkv":
            mine = [row for i, row in enumerate(rows) if kind(i) == part]
            out[name.replace("attention.wqkv", f"self_attn.{part}_proj")] = torch.cat(mine)
    values = dict(rms_norm_eps=config["rms_norm_eps"], attention_bias=config["bias"])
    return llama(out, config, tokens, config["num_hidden_layers"], **values)


EXAONE = SIZES | dict(num_layers=2, head_dim=24, activation_function="silu", layer_norm_epsilon=1e-5,
                      tie_word_embeddings=False, rope_parameters=LLAMA3)  # fmt: skip
INTERNLM2 = SIZES | dict(num_hidden_layers=2, rms_norm_eps=1e-5, bias=False, tie_word_embeddings=False,
                         rope_parameters=dict(rope_type="linear", rope_theta=1e6, factor=2.0))  # fmt: skip
make_exaone, make_internlm2 = formula("exaone", exaone), formula("internlm2", internlm2)
TINY = {
    "exaone": Entry("", EXAONE, "", make=make_exaone),
    "exaone:tied": Entry("", EXAONE | dict(tie_word_embeddings=True, activation_function="gelu"), "", make=make_exaone),
    "internlm2": Entry("", INTERNLM2, "", make=make_internlm2),
    "internlm2:bias": Entry("", INTERNLM2 | dict(bias=True, num_key_value_heads=1), "", make=make_internlm2),
}
