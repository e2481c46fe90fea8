"""Language models that see. Their text alone goes through the suite; what needs images is in test_sight.py."""

from .entry import BASE, Entry

CLIP = dict(model_type="clip_vision_model", hidden_size=32, intermediate_size=48, num_hidden_layers=3,
            num_attention_heads=2, image_size=16, patch_size=4, projection_dim=24)  # fmt: skip
IMAGE = 110  # the token of an entry; the suite's own tokens are below
TEXT = BASE | dict(model_type="llama", rms_norm_eps=1e-5)
LLAVA = dict(vision_config=CLIP, text_config=TEXT, image_token_index=IMAGE, image_seq_length=16)
ONES = dict(vision_config=CLIP | dict(num_channels=3, patch_size=8, hidden_act="gelu"), image_token_index=IMAGE)
SLIDING = BASE | dict(model_type="mistral", sliding_window=8, head_dim=24, tie_word_embeddings=True)
ALL = ONES | dict(text_config=SLIDING, vision_feature_layer=[-1, 0, 2], vision_feature_select_strategy="full",
                  multimodal_projector_bias=False, tie_word_embeddings=True, projector_hidden_act="gelu_new")  # fmt: skip
TINY = {
    "llava": Entry("LlavaConfig", LLAVA, "LlavaForConditionalGeneration", wiring=True),
    "llava:full": Entry("LlavaConfig", ALL, "LlavaForConditionalGeneration"),
}
