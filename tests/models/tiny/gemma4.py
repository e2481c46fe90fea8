"""Gemma 4: layers of two head sizes, some of which attend to the keys and values of another."""

from .entry import BASE, FULL, Entry

SLIDING = "sliding_attention"
# With a small epsilon the last layer's scalar would have no gradient: the norm after it takes it out again.
GEMMA = BASE | dict(head_dim=16, global_head_dim=32, sliding_window=8, final_logit_softcapping=30.0, rms_norm_eps=0.01)
SHARED = GEMMA | dict(num_hidden_layers=6, layer_types=[SLIDING, FULL] * 3, num_kv_shared_layers=2,
                      use_double_wide_mlp=True, hidden_size_per_layer_input=12, vocab_size_per_layer_input=128)  # fmt: skip
DENSE = GEMMA | dict(num_hidden_layers=3, layer_types=[SLIDING, SLIDING, FULL], attention_k_eq_v=True,
                     num_global_key_value_heads=1, hidden_size_per_layer_input=0)  # fmt: skip
PROPORTIONAL = dict(rope_type="proportional", rope_theta=1e5, partial_rotary_factor=0.5, factor=2.0)

TINY = {
    "gemma4_text": Entry("Gemma4TextConfig", SHARED, "Gemma4ForCausalLM", wiring=True),
    "gemma4_text:dense": Entry("Gemma4TextConfig", DENSE | dict(attention_bias=True, tie_word_embeddings=False,
                     rope_parameters={SLIDING: dict(rope_type="default", rope_theta=2e4), FULL: PROPORTIONAL}),
                     "Gemma4ForCausalLM"),
    "gemma4_text:moe": Entry("Gemma4TextConfig", DENSE | dict(enable_moe_block=True, num_experts=6, top_k_experts=2,
                   moe_intermediate_size=40, use_bidirectional_attention="vision"), "Gemma4ForCausalLM"),
}  # fmt: skip
