"""Decoders with latent attention."""

from .entry import BASE, DEEPSEEK, MLA, YARN, Entry
from .randomise import formula
from .routed import xerxes2

V2 = dict(num_hidden_layers=3, **MLA, moe_intermediate_size=40, n_routed_experts=8, num_experts_per_tok=3,
          n_shared_experts=1)  # fmt: skip
XERXES2 = BASE | dict(num_hidden_layers=3, rms_norm_eps=1e-5, tie_word_embeddings=False, moe_intermediate_size=40,
                      num_experts=6, num_experts_per_tok=2, norm_topk_prob=False, mlp_only_layers=[0], q_lora_dim=24,
                      kv_lora_dim=16, qk_rope_head_dim=8, qk_nope_head_dim=12, vhead_dim=20)  # fmt: skip
# Heads enough that hardly any key scores exactly 0, as others do: which of them is chosen would be open.
DSA = dict(index_topk=24, index_head_dim=16, index_n_heads=12, indexer_types=["full", "shared", "full"])

TINY = {
    "deepseek_v3": Entry("DeepseekV3Config", BASE | DEEPSEEK | dict(rope_parameters=YARN | dict(mscale=1.0,
                    mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0)), "DeepseekV3ForCausalLM", wiring=True, loss=3),
    "deepseek_v2": Entry("DeepseekV2Config", BASE | V2 | dict(topk_method="group_limited_greedy", n_group=4, topk_group=2,
                    routed_scaling_factor=1.5, first_k_dense_replace=1), "DeepseekV2ForCausalLM", loss=3),
    "deepseek_v2:lite": Entry("DeepseekV2Config", BASE | V2 | dict(q_lora_rank=None, attention_bias=True,
                         n_shared_experts=2, rope_parameters=YARN | dict(mscale=0.707, mscale_all_dim=0.707)),
                         "DeepseekV2ForCausalLM"),
    "glm4_moe_lite": Entry("Glm4MoeLiteConfig", BASE | DEEPSEEK,
                      "Glm4MoeLiteForCausalLM", loss=3),
    "glm4_moe_lite:listed": Entry("Glm4MoeLiteConfig", BASE | DEEPSEEK | dict(q_lora_rank=None, attention_bias=True,
                             rope_interleave=False, norm_topk_prob=False, mlp_layer_types=["sparse", "dense", "sparse"],
                             tie_word_embeddings=True), "Glm4MoeLiteForCausalLM"),
    "glm_moe_dsa": Entry("GlmMoeDsaConfig", BASE | DEEPSEEK | DSA | dict(n_group=1, topk_group=1),
                    "GlmMoeDsaForCausalLM", wiring=True, loss=3),
    "glm_moe_dsa:every": Entry("GlmMoeDsaConfig", BASE | DEEPSEEK | DSA | dict(indexer_types=None, index_topk=3,
                          attention_bias=True, mlp_layer_types=["sparse", "dense", "sparse"], tie_word_embeddings=True),
                          "GlmMoeDsaForCausalLM"),
    "xerxes2": Entry("", XERXES2, "", loss=3, make=formula("xerxes2", xerxes2)),
    "xerxes2:small": Entry("", XERXES2 | dict(q_lora_dim=None, norm_topk_prob=True, tie_word_embeddings=True,
                      mlp_only_layers=[0, 2]), "", make=formula("xerxes2", xerxes2)),
}  # fmt: skip
