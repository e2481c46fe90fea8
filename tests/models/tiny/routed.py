"""Formulas of families with routed experts that transformers lacks, in float32, from the weights' published names.

Arctic: Snowflake's remote code; Grok-1: xai-org's; Xerxes 1 and 2: EasyDeL's modules. An earlier form of each was compared
with a run of EasyDeL (1.6e-5 at most; Grok-1 without its multipliers and its cap, which EasyDeL leaves out), and these with
that (1.3e-6 at most).
"""


def rms(x, weight, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x, theta=10000.0):
    """Rotate the halves of [rows heads tokens channels]."""
    import torch

    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] / theta ** (torch.arange(half) / half)
    a, b = x.split(half, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def attend(q, k, v, scale, cap=None, window=None):
    """Causal attention of [rows heads tokens channels], as [rows tokens heads * channels]."""
    import torch

    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    scores = scores if cap is None else cap * (scores / cap).tanh()
    seen = torch.ones(scores.shape[-2:]).tril().bool()
    seen &= torch.ones(scores.shape[-2:]).triu(1 - (window or len(seen))).bool()
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


def glu(x, w, name, parts, act):
    gate, up, down = (w[f"{name}{part}.weight"] for part in parts)
    return (act(x @ gate.T) * (x @ up.T)) @ down.T


class Decoder:
    """What the four have in common: weights under a layer's name, heads, experts."""

    def __init__(self, weights, config):
        self.w, self.c = weights, config

    def linear(self, x, name):
        return x @ self.w[f"{name}.weight"].T

    def norm(self, x, name):
        return rms(x, self.w[f"{name}.weight"], self.c["rms_norm_eps"])

    def heads(self, x, name, count):
        return self.linear(x, name).unflatten(-1, (self.c[count], -1)).transpose(1, 2)

    def qkv(self, x, name):
        counts = "num_attention_heads", "num_key_value_heads", "num_key_value_heads"
        return (self.heads(x, f"{name}{part}_proj", n) for part, n in zip("qkv", counts, strict=True))

    def experts(self, x, name, count, parts, act, normalize):
        """Every expert of every token, times its share."""
        import torch

        share = self.linear(x, f"{name}gate").softmax(-1)
        top, chosen = share.topk(self.c["num_experts_per_tok"], -1)
        top = top / top.sum(-1, keepdim=True) if normalize else top
        share = torch.zeros_like(share).scatter(-1, chosen, top)
        return sum(share[..., [e]] * glu(x, self.w, f"{name}experts.{e}.", parts, act) for e in range(self.c[count]))

    def logits(self, x):
        tied = self.c["tie_word_embeddings"]
        return self.linear(self.norm(x, "model.norm"), "model.embed_tokens" if tied else "lm_head")

    def start(self, tokens):
        return self.w["model.embed_tokens.weight"][tokens]

    def layers(self):
        return [f"model.layers.{i}." for i in range(self.c["num_hidden_layers"])]


def gelu(x):
    from torch.nn.functional import gelu

    return gelu(x, approximate="tanh")


def silu(x):
    return x * x.sigmoid()


def grok_1(weights, c, tokens):
    m = Decoder(weights, c)
    x = m.start(tokens) * c["embedding_multiplier_scale"]
    for p in m.layers():
        q, k, v = m.qkv(m.norm(x, p + "pre_attn_norm"), p + "attn.")
        a = attend(turn(q), turn(k), v, c["attn_output_multiplier"], c["max_attn_value"])
        x = x + m.norm(m.linear(a, p + "attn.o_proj"), p + "post_attn_norm")
        parts = "linear", "linear_v", "linear_1"
        y = m.experts(m.norm(x, p + "pre_moe_norm"), p + "moe_block.", "num_experts", parts, gelu, False)
        x = x + m.norm(y, p + "post_moe_norm")
    return m.logits(x) * c["output_multiplier_scale"]


def arctic(weights, c, tokens):
    m, parts = Decoder(weights, c), ("w1", "w3", "w2")
    x = m.start(tokens)
    for i, p in enumerate(m.layers()):
        before = x
        q, k, v = m.qkv(m.norm(x, p + "input_layernorm"), p + "self_attn.")
        q, k = (turn(side, c["rope_theta"]) for side in (q, k))
        a = attend(q, k, v, q.shape[-1] ** -0.5, window=c.get("sliding_window"))
        x = x + m.linear(a, p + "self_attn.o_proj")
        moe = p + "block_sparse_moe."
        if (i + 1) % c["moe_layer_frequency"]:
            x = x + glu(m.norm(x, p + "post_attention_layernorm"), weights, moe + "mlp.", parts, silu)
            continue
        read = before if c["parallel_attn_mlp_res"] else x
        h = m.norm(read, p + "post_attention_layernorm")
        y = m.experts(h, moe, "num_local_experts", parts, silu, c["num_experts_per_tok"] > 1)
        if c["parallel_attn_mlp_res"]:
            y = y + glu(m.norm(x, p + "residual_layernorm"), weights, p + "residual_mlp.", parts, silu)
        x = x + y
    return m.logits(x)


GATED = "gate_proj", "up_proj", "down_proj"


def xerxes(weights, c, tokens):
    m, moe, qk = Decoder(weights, c), c["xe_moe"], c["xe_kvnorm"]
    sandwich, act = moe or not qk or c["xe_mlpnorm"], silu if c["swish_run"] else gelu
    x = m.start(tokens) * (1.0 if qk and not c["xe_mlpnorm"] else c["hidden_size"] ** 0.5)
    for i, p in enumerate(m.layers()):
        q, k, v = m.qkv(m.norm(x, p + "input_layernorm"), p + "self_attn.")
        if qk:
            q, k = m.norm(q, p + "self_attn.q_norm"), m.norm(k, p + "self_attn.k_norm")
        window = None if qk or i % 2 else 4096
        if c["window_pattern"]:
            window = c["sliding_window"] if (i + 1) % c["window_pattern"] else None
        a = m.linear(attend(turn(q), turn(k), v, q.shape[-1] ** -0.5, window=window), p + "self_attn.o_proj")
        x = x + (m.norm(a, p + "post_attention_layernorm") if sandwich else a)
        h = m.norm(x, p + ("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"))
        if moe:
            y = m.experts(h, p + "mlp.", "num_local_experts", GATED, act, True)
        else:
            y = glu(h, weights, p + "mlp.", GATED, act)
        x = x + (m.norm(y, p + "post_feedforward_layernorm") if sandwich else y)
    return m.logits(x) if qk and not moe else 30 * (m.logits(x) / 30).tanh()


def xerxes2(weights, c, tokens):
    import torch
    from torch.nn.functional import layer_norm

    m, nope, heads = Decoder(weights, c), c["qk_nope_head_dim"], "num_attention_heads"
    x = m.start(tokens)
    for i, p in enumerate(m.layers()):
        h, at = m.norm(x, p + "input_layernorm"), p + "self_attn."
        centred = lambda x, n, at=at: layer_norm(
            x, x.shape[-1:], weights[f"{at}{n}.weight"], weights[f"{at}{n}.bias"], 1e-6
        )
        if c["q_lora_dim"] is None:
            q = m.heads(h, at + "q_proj", heads)
        else:
            q = m.heads(centred(m.linear(h, at + "q_a_proj"), "q_a_layernorm"), at + "q_b_proj", heads)
        latent, common = m.linear(h, at + "kv_a_proj_with_mqa").split([c["kv_lora_dim"], c["qk_rope_head_dim"]], -1)
        k, v = m.heads(centred(latent, "kv_a_layernorm"), at + "kv_b_proj", heads).split([nope, c["vhead_dim"]], -1)
        q = torch.cat([q[..., :nope], turn(q[..., nope:])], -1)
        k = torch.cat([k, turn(common[:, None]).expand(-1, k.shape[1], -1, -1)], -1)
        a = m.linear(attend(q, k, v, q.shape[-1] ** -0.5), at + "o_proj")
        x = x + m.norm(a, p + "post_attention_layernorm")
        h = m.norm(x, p + "pre_feedforward_layernorm")
        if i in c["mlp_only_layers"]:
            gate, up = m.linear(h, p + "mlp.gate_up_proj").chunk(2, -1)
            y = m.linear(silu(gate) * up, p + "mlp.down_proj")
        else:
            y = m.experts(h, p + "mlp.", "num_experts", GATED, silu, c["norm_topk_prob"])
        x = x + m.norm(y, p + "post_feedforward_layernorm")
    return m.logits(x)
