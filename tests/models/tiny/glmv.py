"""GLM's models that see."""

from .entry import BASE, Entry

TOKENS = dict(image_token_id=120, video_token_id=121, image_start_token_id=118, image_end_token_id=119)
TURNS = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5, mrope_section=[2, 1, 1])
TEXT = BASE | dict(rope_parameters=TURNS)
ROUTED = TEXT | dict(head_dim=24, moe_intermediate_size=40, n_routed_experts=6, num_experts_per_tok=2, n_group=2,
                     topk_group=1, rope_parameters=TURNS | dict(mrope_section=[2, 3, 1]))  # fmt: skip
TOWER = dict(
    depth=2, hidden_size=32, num_heads=2, image_size=18, patch_size=4, out_hidden_size=64, intermediate_size=48
)
TINY = {
    "glm4v": Entry("Glm4vConfig", dict(TOKENS, text_config=TEXT, vision_config=TOWER), "Glm4vForConditionalGeneration"),
    "glm46v": Entry("Glm46VConfig", dict(TOKENS, text_config=TEXT, tie_word_embeddings=True,
               vision_config=TOWER | dict(attention_bias=True)), "Glm46VForConditionalGeneration"),
    "glm4v_moe": Entry("Glm4vMoeConfig", dict(TOKENS, text_config=ROUTED, vision_config=TOWER),
                  "Glm4vMoeForConditionalGeneration", loss=3),
}  # fmt: skip
