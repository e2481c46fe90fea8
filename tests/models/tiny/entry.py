"""What the entries of several files share: the record of an entry, and values of config.json."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """A tiny configuration of a family, and what the suite must know of it and of its oracle."""

    config: str  # transformers' config class
    values: dict[str, Any]
    model: str  # transformers' model class
    wiring: bool = False  # CI runs every check of it; of the others, those that cost little (`make matrix` runs all)
    served: bool = True  # False: the oracle itself changes what was cached, as a long rope does
    causal: bool = True  # False: tokens see later ones
    loss: float = 1.0  # how much more its logits lose in few bits than a dense transformer's: a flipped expert, a state
    states: Callable[[Any, Any, tuple], tuple] | None = None  # (model, tokens, its hidden_states) -> all of them
    keep: tuple[str, ...] = ()  # ends of the names of saved buffers that are computed from the config
    attn: str = "eager"  # how the oracle attends, where its eager way is wrong
    make: Callable[[dict[str, Any], int], Any] | None = None  # (values, seed) -> the oracle, if transformers has none


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
