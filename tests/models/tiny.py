"""Tiny random checkpoints of every family, made by transformers with every weight randomised: the oracle of the suite."""

import json
from pathlib import Path

BASE = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)
MLA = dict(
    kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=20, num_key_value_heads=4
)
DEEPSEEK = dict(num_hidden_layers=3, **MLA, moe_intermediate_size=40, n_routed_experts=8, num_experts_per_tok=3,
                n_shared_experts=1, first_k_dense_replace=1, n_group=4, topk_group=2, num_mtp_layers=0)  # fmt: skip
LINEAR, FULL = "linear_attention", "full_attention"
NEXT = dict(head_dim=16, num_hidden_layers=4, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40,
            shared_expert_intermediate_size=48, linear_key_head_dim=8, linear_value_head_dim=12,
            linear_num_key_heads=2, linear_num_value_heads=4)  # fmt: skip

# name -> (config class, config values, model class); "family:variant" switches on another path of a family
TINY: dict[str, tuple[str, dict, str]] = {
    "llama": ("LlamaConfig", BASE, "LlamaForCausalLM"),
    "llama:bias_llama3": ("LlamaConfig", BASE | dict(attention_bias=True, mlp_bias=True, head_dim=24,
                          tie_word_embeddings=True, rope_parameters=LLAMA3), "LlamaForCausalLM"),
    "llama:yarn": ("LlamaConfig", BASE | dict(rope_parameters=YARN), "LlamaForCausalLM"),
    "llama:linear": ("LlamaConfig", BASE | dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0)),
                     "LlamaForCausalLM"),
    "llama:dynamic": ("LlamaConfig", BASE | dict(max_position_embeddings=16, rope_parameters=dict(rope_type="dynamic",
                      rope_theta=1e4, factor=3.0)), "LlamaForCausalLM"),
    "llama:longrope": ("LlamaConfig", BASE | dict(rope_parameters=dict(rope_type="longrope", rope_theta=1e4, factor=8.0,
                       original_max_position_embeddings=16, short_factor=[1 + 0.1 * i for i in range(8)],
                       long_factor=[2 + 0.5 * i for i in range(8)])), "LlamaForCausalLM"),
    "qwen3": ("Qwen3Config", BASE | dict(head_dim=24, tie_word_embeddings=True), "Qwen3ForCausalLM"),
    "qwen3:sliding": ("Qwen3Config", BASE | dict(head_dim=24, num_hidden_layers=3, use_sliding_window=True,
                      sliding_window=8, max_window_layers=1, attention_bias=True), "Qwen3ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", BASE | dict(head_dim=16, num_hidden_layers=7, sliding_window=8,
               query_pre_attn_scalar=24, layer_types=(["sliding_attention"] * 2 + [FULL]) * 2 + ["sliding_attention"],
               rope_parameters={"sliding_attention": dict(rope_type="default", rope_theta=1e4),
               FULL: dict(rope_type="linear", rope_theta=1e6, factor=8.0)}), "Gemma3ForCausalLM"),
    "mixtral": ("MixtralConfig", BASE | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
                "MixtralForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", BASE | dict(head_dim=24, num_hidden_layers=3, num_experts=6, num_experts_per_tok=2,
                  moe_intermediate_size=40, norm_topk_prob=True, mlp_only_layers=[0]), "Qwen3MoeForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", BASE | DEEPSEEK | dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0,
                    beta_fast=32.0, beta_slow=1.0)), "DeepseekV3ForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", BASE | NEXT | dict(mlp_only_layers=[1], layer_types=[LINEAR, FULL] * 2),
                   "Qwen3NextForCausalLM"),
    "mamba2": ("Mamba2Config", dict(vocab_size=128, hidden_size=64, state_size=8, num_hidden_layers=2, expand=2,
               conv_kernel=4, num_heads=8, head_dim=16, n_groups=2, chunk_size=8, pad_token_id=0, bos_token_id=1,
               eos_token_id=2), "Mamba2ForCausalLM"),
    "gpt2": ("GPT2Config", dict(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=1,
             eos_token_id=2), "GPT2LMHeadModel"),
}  # fmt: skip


def randomise(model, seed: int) -> None:
    """Overwrite every parameter and saved float buffer with seeded values of a size that matters to the logits."""
    import torch

    g = torch.Generator().manual_seed(seed)
    saved, seen = set(model.state_dict()), set()
    items = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in saved)]
    with torch.no_grad():
        for name, p in sorted(items, key=lambda item: item[0]):
            if p.data_ptr() in seen or not p.is_floating_point():
                continue
            seen.add(p.data_ptr())
            leaf, r = name.rsplit(".", 1)[-1], torch.randn(p.shape, generator=g)
            if leaf == "A_log":
                value = 1.5 * torch.rand(p.shape, generator=g)
            elif leaf == "dt_bias":
                value = -2 + 0.5 * r
            elif leaf == "D":
                value = 1 + 0.3 * r
            elif p.ndim <= 1:  # norms around their own initial value, biases around zero
                value = (p.float() if leaf == "weight" else 0) + 0.2 * r
            elif "embed" in name or "wte" in name or "wpe" in name:
                value = 0.5 * r
            else:
                value = r * 1.2 / (p[0].numel() if p.ndim > 2 and "conv" in name else p.shape[-1]) ** 0.5
            p.copy_(value)


def build(name: str, seed: int = 0):
    """Make the torch model of an entry, float32, eager attention, in eval mode, with every weight randomised."""
    import torch
    import transformers

    config, values, model = TINY[name]
    torch.manual_seed(seed)
    cfg = getattr(transformers, config)(**json.loads(json.dumps(values)))
    out = getattr(transformers, model)._from_config(cfg, attn_implementation="eager", dtype=torch.float32).eval()
    randomise(out, seed)
    return out


def checkpoint(name: str, directory: Path, seed: int = 0, **kwargs):
    """Save the torch model of an entry in hub layout; returns the torch model."""
    model = build(name, seed)
    model.save_pretrained(directory, **kwargs)
    return model
