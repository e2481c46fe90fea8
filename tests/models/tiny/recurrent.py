"""Recurrent models: what serving remembers of a sequence has a fixed size."""

from .entry import Entry


def without_embedding(model, tokens, states):
    """Put in front what the list of transformers' state-space models leaves out; it ends with one state too many."""
    return (model.get_input_embeddings()(tokens), *states[:-2], states[-1])


def after_the_first_norm(model, tokens, states):
    """The same; and RWKV's first layer begins with a norm that here is one of the embeddings."""
    first = model.rwkv.blocks[0].pre_ln(model.get_input_embeddings()(tokens))
    return (first, *states[:-2], states[-1])


IDS = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
MAMBA = IDS | dict(state_size=8, expand=2, conv_kernel=4, time_step_rank=6)
# Every switch at its other value.
OTHER = IDS | dict(state_size=8, expand=3, conv_kernel=3, use_bias=True, use_conv_bias=False, tie_word_embeddings=False,
                   residual_in_fp32=False, hidden_act="gelu")  # fmt: skip
MAMBA2 = IDS | dict(state_size=8, expand=2, conv_kernel=4, num_heads=8, head_dim=16, n_groups=2, chunk_size=8)
RWKV = IDS | dict(intermediate_size=96, context_length=64, rescale_every=0)

TINY = {
    "mamba": Entry("MambaConfig", MAMBA, "MambaForCausalLM", loss=1.1, states=without_embedding),  # nf4: 0.463
    "mamba:other": Entry("MambaConfig", OTHER, "MambaForCausalLM"),
    "falcon_mamba": Entry("FalconMambaConfig", MAMBA, "FalconMambaForCausalLM", states=without_embedding),
    "falcon_mamba:other": Entry("FalconMambaConfig", OTHER | dict(mixer_rms_eps=1e-2), "FalconMambaForCausalLM"),
    "mamba2": Entry("Mamba2Config", MAMBA2, "Mamba2ForCausalLM", wiring=True, states=without_embedding),
    "mamba2:other": Entry("Mamba2Config", OTHER | dict(num_heads=6, head_dim=32, n_groups=3, time_step_limit=[0.05, 0.2]),
                     "Mamba2ForCausalLM"),
    "rwkv": Entry("RwkvConfig", RWKV, "RwkvForCausalLM", wiring=True, states=after_the_first_norm),
    # Without a cache, since transformers' has room for hidden_size channels only.
    "rwkv:wide": Entry("RwkvConfig", RWKV | dict(attention_hidden_size=80, use_cache=False, tie_word_embeddings=True,
                  layer_norm_epsilon=1e-3), "RwkvForCausalLM"),
}  # fmt: skip
