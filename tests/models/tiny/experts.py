"""Decoders with routed experts."""

from .entry import BASE, FULL, LINEAR, LLAMA3, NEXT, YARN, Entry
from .randomise import formula
from .routed import arctic, grok_1, xerxes

LLAMA4 = BASE | dict(head_dim=16, num_hidden_layers=4, intermediate_size=40, intermediate_size_mlp=96, num_local_experts=4,
                     attention_chunk_size=8, floor_scale=4, attn_scale=0.1)  # fmt: skip
GPT_OSS = BASE | dict(head_dim=16, swiglu_limit=1.0, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
GLM = dict(moe_intermediate_size=40, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, first_k_dense_replace=1,
           num_mtp_layers=0, routed_scaling_factor=1.5)  # fmt: skip
PHIMOE = BASE | dict(num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.4)
FORMULA = BASE | dict(rms_norm_eps=1e-5, tie_word_embeddings=False, num_experts_per_tok=2)
GROK = FORMULA | dict(num_experts=6, embedding_multiplier_scale=3.0, attn_output_multiplier=0.7, max_attn_value=1.5,
                      output_multiplier_scale=0.6)  # fmt: skip
ARCTIC = FORMULA | dict(num_hidden_layers=3, num_local_experts=4, moe_layer_frequency=2, parallel_attn_mlp_res=True,
                        rope_theta=1e6)  # fmt: skip
XERXES = FORMULA | dict(head_dim=24, num_local_experts=4, xe_moe=True, xe_kvnorm=False, xe_mlpnorm=False, swish_run=False,
                        window_pattern=None, sliding_window=None)  # fmt: skip
LONG = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=16, short_mscale=1.1, long_mscale=1.3,
            short_factor=[1 + 0.1 * i for i in range(8)], long_factor=[1 + 0.1 * i for i in range(8)])  # fmt: skip


def dbrx(kv_heads: int, clip: float, **experts: object) -> dict:
    """A tiny DBRX."""
    attention = dict(kv_n_heads=kv_heads, clip_qkv=clip, rope_theta=10000.0)
    return dict(vocab_size=128, d_model=64, n_heads=4, n_layers=2, max_seq_len=128, attn_config=attention,
                ffn_config=dict(hidden_size=64, ffn_hidden_size=48, **experts))  # fmt: skip


TINY = {
    "mixtral": Entry("MixtralConfig", BASE | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
                "MixtralForCausalLM", wiring=True, loss=3),
    "qwen3_moe": Entry("Qwen3MoeConfig", BASE | dict(head_dim=24, num_hidden_layers=3, num_experts=6, num_experts_per_tok=2,
                  moe_intermediate_size=40, norm_topk_prob=True, mlp_only_layers=[0]), "Qwen3MoeForCausalLM", loss=3),
    "qwen3_next": Entry("Qwen3NextConfig", BASE | NEXT | dict(mlp_only_layers=[1], layer_types=[LINEAR, FULL] * 2),
                   "Qwen3NextForCausalLM", wiring=True, loss=3),
    "qwen2_moe": Entry("Qwen2MoeConfig", BASE | dict(num_hidden_layers=3, num_experts=6, num_experts_per_tok=2,
                  moe_intermediate_size=40, shared_expert_intermediate_size=48, mlp_only_layers=[1]),
                  "Qwen2MoeForCausalLM", loss=3),
    "qwen2_moe:sliding": Entry("Qwen2MoeConfig", BASE | dict(num_hidden_layers=4, num_experts=6, num_experts_per_tok=2,
                          moe_intermediate_size=40, shared_expert_intermediate_size=48, decoder_sparse_step=2, head_dim=24,
                          use_sliding_window=True, sliding_window=8, max_window_layers=3, qkv_bias=False,
                          norm_topk_prob=True, tie_word_embeddings=True), "Qwen2MoeForCausalLM"),
    "llama4_text": Entry("Llama4TextConfig", LLAMA4 | dict(num_experts_per_tok=2, interleave_moe_layer_step=2),
               "Llama4ForCausalLM", wiring=True, loss=3),
    "llama4_text:scout": Entry("Llama4TextConfig", LLAMA4 | dict(num_experts_per_tok=1, use_qk_norm=False,
                     attn_temperature_tuning=False, attention_bias=True, no_rope_layers=[1, 0, 1, 1], moe_layers=[0, 1, 3],
                     tie_word_embeddings=True, rope_parameters=LLAMA3), "Llama4ForCausalLM"),
    "gpt_oss": Entry("GptOssConfig", GPT_OSS | dict(rope_parameters=YARN | dict(rope_theta=150000.0, truncate=False)),
                "GptOssForCausalLM", wiring=True, loss=3),
    "gpt_oss:full": Entry("GptOssConfig", GPT_OSS | dict(attention_bias=False, layer_types=[FULL] * 2, swiglu_alpha=1.1,
                     tie_word_embeddings=True), "GptOssForCausalLM"),
    "glm4_moe": Entry("Glm4MoeConfig", BASE | GLM | dict(head_dim=24, num_hidden_layers=3, attention_bias=True,
                 use_qk_norm=True, n_group=4, topk_group=2), "Glm4MoeForCausalLM", loss=3),
    "glm4_moe:plain": Entry("Glm4MoeConfig", BASE | GLM | dict(num_hidden_layers=2, first_k_dense_replace=0,
                       norm_topk_prob=False, n_shared_experts=2), "Glm4MoeForCausalLM"),
    # A band of the published 0.01 has one expert in it, whose weight is 1.
    "phimoe": Entry("PhimoeConfig", PHIMOE | dict(attention_bias=True, lm_head_bias=True), "PhimoeForCausalLM", loss=3),
    # transformers 5.23 keeps the short factors beyond the original context, unlike the published code: both are equal here.
    "phimoe:long": Entry("PhimoeConfig", PHIMOE | dict(rope_parameters=LONG, head_dim=16, tie_word_embeddings=True),
                    "PhimoeForCausalLM", served=False),
    "phimoe:window": Entry("PhimoeConfig", PHIMOE | dict(sliding_window=8, rope_parameters=LONG | dict(
                      original_max_position_embeddings=64, long_factor=[2 + i for i in range(8)])), "PhimoeForCausalLM"),
    "dbrx": Entry("DbrxConfig", dbrx(2, 1.0, moe_top_k=2), "DbrxForCausalLM", loss=3),
    "dbrx:norm": Entry("DbrxConfig", dbrx(4, 2.0, moe_num_experts=6, moe_top_k=3, moe_normalize_expert_weights=2.0,
                  ffn_act_fn=dict(name="gelu")), "DbrxForCausalLM"),
    "dbrx:share": Entry("DbrxConfig", dbrx(1, 2.0, moe_normalize_expert_weights=None), "DbrxForCausalLM"),
    "grok_1": Entry("", GROK, "", loss=3, make=formula("grok-1", grok_1)),
    "grok_1:tied": Entry("", GROK | dict(tie_word_embeddings=True), "", make=formula("grok-1", grok_1)),
    "arctic": Entry("", ARCTIC, "", loss=3, make=formula("arctic", arctic)),
    "arctic:serial": Entry("", ARCTIC | dict(parallel_attn_mlp_res=False, num_experts_per_tok=1, sliding_window=8), "",
                      make=formula("arctic", arctic)),
    "xerxes": Entry("", XERXES, "", loss=3, make=formula("xerxes", xerxes)),
    "xerxes:plain": Entry("", XERXES | dict(xe_moe=False, xe_kvnorm=True, swish_run=True, window_pattern=2,
                     sliding_window=8), "", make=formula("xerxes", xerxes)),
    "xerxes:norms": Entry("", XERXES | dict(xe_moe=False, xe_kvnorm=True, xe_mlpnorm=True, tie_word_embeddings=True), "",
                     make=formula("xerxes", xerxes)),
    "xerxes:routed": Entry("", XERXES | dict(xe_kvnorm=True), "", make=formula("xerxes", xerxes)),
}  # fmt: skip
