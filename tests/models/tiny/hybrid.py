"""Models with recurrent mixers beside attention, in other layers or in the same one."""

from .entry import BASE, FULL, LINEAR, MLA, NEXT, Entry

H1 = BASE | dict(
    mamba_d_ssm=96, mamba_n_heads=6, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=8, mamba_chunk_size=8,
    mamba_rms_norm=True, mamba_norm_before_gate=False, lm_head_multiplier=0.5, embedding_multiplier=2.0,
    mlp_multipliers=[0.8, 1.2], key_multiplier=0.7, attention_out_multiplier=0.9, attention_in_multiplier=1.1,
    ssm_multipliers=[0.5, 0.6, 0.7, 0.8, 0.9], ssm_in_multiplier=1.25, ssm_out_multiplier=0.75,
)  # fmt: skip
H1_BIASED = dict(mamba_proj_bias=True, projectors_bias=True, attention_bias=True, mlp_bias=True, hidden_act="gelu")
MROPE = dict(
    rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True
)
NEXT5 = (
    BASE
    | NEXT
    | dict(linear_key_head_dim=16, linear_value_head_dim=16, layer_types=[LINEAR, FULL] * 2, rope_parameters=MROPE)
)
MOE5 = {k: v for k, v in NEXT5.items() if k != "intermediate_size"}
NEXT5 = {k: v for k, v in NEXT5.items() if "expert" not in k and "moe" not in k}
OTHER = dict(attention_bias=True, hidden_act="gelu", linear_conv_kernel_dim=3, tie_word_embeddings=True)
MINIMAX = BASE | dict(
    head_dim=16, num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2, block_size=8, full_attn_alpha_factor=3.0,
    full_attn_beta_factor=1.0, linear_attn_alpha_factor=2.0, linear_attn_beta_factor=1.5, mlp_alpha_factor=2.5,
    mlp_beta_factor=0.5,
)  # fmt: skip
DERIVED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
KIMI = BASE | MLA | dict(
    num_hidden_layers=4, q_lora_rank=None, moe_intermediate_size=40, num_local_experts=6, num_experts_per_tok=2,
    linear_head_dim=16, linear_num_heads=2, layer_types=[LINEAR, FULL] * 2, rms_norm_eps=1e-4,
)  # fmt: skip

TINY = {
    "kimi_linear": Entry("KimiLinearConfig", KIMI, "KimiLinearForCausalLM", loss=4.1),  # int8: 0.203, fp8: 0.483
    "kimi_linear:other": Entry("KimiLinearConfig", KIMI | dict(q_lora_rank=24, attention_bias=True, n_shared_experts=2,
                          n_group=3, topk_group=2, norm_topk_prob=False, mlp_layer_types=["sparse", "dense"] * 2,
                          linear_conv_kernel_dim=3, linear_num_heads=3, hidden_act="gelu"), "KimiLinearForCausalLM"),
    "minimax": Entry("MiniMaxConfig", MINIMAX, "MiniMaxForCausalLM", loss=3, keep=DERIVED),
    "minimax:other": Entry("MiniMaxConfig", MINIMAX | dict(sliding_window=8, layer_types=[LINEAR] * 2 + [FULL, LINEAR],
                      hidden_act="gelu", tie_word_embeddings=True), "MiniMaxForCausalLM", keep=DERIVED),
    "qwen3_5_text": Entry("Qwen3_5TextConfig", NEXT5, "Qwen3_5ForCausalLM", loss=1.4),  # nf4: 0.625
    "qwen3_5_text:other": Entry("Qwen3_5TextConfig", {k: v for k, v in NEXT5.items() if k not in ("layer_types",
                      "rope_parameters")} | OTHER, "Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": Entry("Qwen3_5MoeTextConfig", MOE5, "Qwen3_5MoeForCausalLM", loss=3),
    "qwen3_5_moe_text:other": Entry("Qwen3_5MoeTextConfig", MOE5 | OTHER, "Qwen3_5MoeForCausalLM"),
    "falcon_h1": Entry("FalconH1Config", H1, "FalconH1ForCausalLM"),
    "falcon_h1:biased": Entry("FalconH1Config", H1 | H1_BIASED | dict(mamba_rms_norm=False, tie_word_embeddings=True,
                         mamba_d_head="auto", mamba_d_ssm=None, mamba_expand=3), "FalconH1ForCausalLM"),
    "falcon_h1:norm_first": Entry("FalconH1Config", H1 | dict(mamba_norm_before_gate=True, mamba_conv_bias=False,
                             mamba_d_conv=3, head_dim=24, time_step_limit=[0.05, 0.2]), "FalconH1ForCausalLM"),
}  # fmt: skip
