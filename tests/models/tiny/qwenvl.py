"""Qwen's models that see."""

from .entry import BASE, FULL, LINEAR, Entry
from .hybrid import MOE5, NEXT5

TOKENS = dict(image_token_id=120, video_token_id=121, vision_start_token_id=118, vision_end_token_id=119)
CHUNKS = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 3, 3])
IN_TURN = CHUNKS | dict(mrope_section=[4, 2, 2], mrope_interleaved=True)
SIZES = dict(num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2)
GATED = SIZES | dict(depth=4, hidden_size=32, out_hidden_size=64, intermediate_size=48, window_size=16)
DEEP = SIZES | dict(depth=4, hidden_size=32, out_hidden_size=64, intermediate_size=48, num_position_embeddings=16,
                    deepstack_visual_indexes=[0, 2])  # fmt: skip
PLAIN = {k: v for k, v in DEEP.items() if k != "deepstack_visual_indexes"} | dict(depth=2)
TWO = dict(num_hidden_layers=2, layer_types=[LINEAR, FULL])
TINY = {
    "qwen2_vl": Entry("Qwen2VLConfig", dict(TOKENS, text_config=BASE | dict(rope_parameters=CHUNKS),
                 vision_config=SIZES | dict(depth=2, embed_dim=32, hidden_size=64, mlp_ratio=2)),
                 "Qwen2VLForConditionalGeneration"),
    "qwen2_5_vl": Entry("Qwen2_5_VLConfig", dict(TOKENS, tie_word_embeddings=True,
                   text_config=BASE | dict(rope_parameters=CHUNKS), vision_config=GATED | dict(
                   fullatt_block_indexes=[1, 3])), "Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": Entry("Qwen3VLConfig", dict(TOKENS, text_config=BASE | dict(head_dim=16, num_hidden_layers=4,
                 rope_parameters=IN_TURN), vision_config=DEEP), "Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": Entry("Qwen3VLMoeConfig", dict(TOKENS, text_config=BASE | dict(head_dim=16, num_hidden_layers=3,
                     num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40, rope_parameters=IN_TURN),
                     vision_config=DEEP), "Qwen3VLMoeForConditionalGeneration", loss=3),
    "qwen3_5": Entry("Qwen3_5Config", dict(TOKENS, text_config=NEXT5 | TWO, vision_config=PLAIN),
                     "Qwen3_5ForConditionalGeneration", loss=1.4),
    "qwen3_5_moe": Entry("Qwen3_5MoeConfig", dict(TOKENS, text_config=MOE5 | TWO, vision_config=PLAIN),
                         "Qwen3_5MoeForConditionalGeneration", loss=3),
}  # fmt: skip
