"""Decoders in the manner of GPT: LayerNorm, biases, learned positions or ALiBi."""

from .entry import BASE, Entry

GPT = dict(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
NEOX = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
OPT = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, ffn_dim=96, max_position_embeddings=128,
           num_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
MPT = dict(vocab_size=128, d_model=64, n_heads=4, n_layers=2, max_seq_len=128)
FALCON = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, bos_token_id=1,
              eos_token_id=2, max_position_embeddings=128)  # fmt: skip

TINY = {
    "gpt2": Entry("GPT2Config", GPT, "GPT2LMHeadModel", wiring=True),
    "gpt_neox": Entry("GPTNeoXConfig", NEOX, "GPTNeoXForCausalLM"),
    "gpt_neox:sequential": Entry("GPTNeoXConfig", NEOX | dict(use_parallel_residual=False, attention_bias=False,
                            tie_word_embeddings=True, hidden_act="gelu_fast", rope_parameters=dict(rope_type="default",
                            rope_theta=1e4, partial_rotary_factor=1.0)), "GPTNeoXForCausalLM"),
    "gpt_j": Entry("GPTJConfig", GPT | dict(n_positions=128, rotary_dim=8), "GPTJForCausalLM"),
    "gpt_j:inner": Entry("GPTJConfig", GPT | dict(rotary_dim=16, n_inner=96, activation_function="relu",
                    tie_word_embeddings=True),
                    "GPTJForCausalLM"),
    "opt": Entry("OPTConfig", OPT, "OPTForCausalLM"),
    "opt:after": Entry("OPTConfig", OPT | dict(do_layer_norm_before=False, word_embed_proj_dim=32), "OPTForCausalLM"),
    "opt:plain": Entry("OPTConfig", OPT | dict(enable_bias=False, layer_norm_elementwise_affine=False,
                  word_embed_proj_dim=32, activation_function="gelu", tie_word_embeddings=False), "OPTForCausalLM"),
    "opt:no_last_norm": Entry("OPTConfig", OPT | dict(_remove_final_layer_norm=True), "OPTForCausalLM"),
    "mpt": Entry("MptConfig", MPT | dict(attn_config=dict(clip_qkv=1.5)), "MptForCausalLM"),
    "mpt:6heads": Entry("MptConfig", MPT | dict(d_model=48, n_heads=6, tie_word_embeddings=False,
                   attn_config=dict(softmax_scale=0.2)), "MptForCausalLM"),
    "falcon": Entry("FalconConfig", FALCON | dict(new_decoder_architecture=True, num_kv_heads=2), "FalconForCausalLM"),
    "falcon:7b": Entry("FalconConfig", FALCON | dict(multi_query=True, parallel_attn=True), "FalconForCausalLM"),
    "falcon:sequential": Entry("FalconConfig", FALCON | dict(multi_query=True, parallel_attn=False, bias=True,
                          rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)), "FalconForCausalLM"),
    "falcon:rw": Entry("FalconConfig", FALCON | dict(multi_query=False, parallel_attn=False, alibi=True, bias=True),
                  "FalconForCausalLM", attn="sdpa"),  # eager attention adds the slopes twice
    "falcon:rw_6heads": Entry("FalconConfig", FALCON | dict(hidden_size=48, num_attention_heads=6, multi_query=False,
                         alibi=True), "FalconForCausalLM", attn="sdpa"),
    "falcon:11b": Entry("FalconConfig", FALCON | dict(new_decoder_architecture=True, num_kv_heads=2, activation="relu",
                   num_ln_in_parallel_attn=1, ffn_hidden_size=96, tie_word_embeddings=False), "FalconForCausalLM"),
}  # fmt: skip
