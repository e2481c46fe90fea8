"""Language models that see. Their text alone goes through the suite; what needs images is in test_sight.py."""

import json

import numpy as np

from .dense import SLIDING as WINDOW
from .dense import TUNED
from .entry import BASE, FULL, Entry
from .experts import LLAMA4

CLIP = dict(model_type="clip_vision_model", hidden_size=32, intermediate_size=48, num_hidden_layers=3,
            num_attention_heads=2, image_size=16, patch_size=4, projection_dim=24)  # fmt: skip
IMAGE = 110  # the token of an entry; the suite's own tokens are below
TEXT = BASE | dict(model_type="llama", rms_norm_eps=1e-5)
LLAVA = dict(vision_config=CLIP, text_config=TEXT, image_token_index=IMAGE, image_seq_length=16)
ONES = dict(vision_config=CLIP | dict(num_channels=3, patch_size=8, hidden_act="gelu"), image_token_index=IMAGE)
SLIDING = BASE | dict(model_type="mistral", sliding_window=8, head_dim=24, tie_word_embeddings=True)
ALL = ONES | dict(text_config=SLIDING, vision_feature_layer=[-1, 0, 2], vision_feature_select_strategy="full",
                  multimodal_projector_bias=False, tie_word_embeddings=True, projector_hidden_act="gelu_new")  # fmt: skip
PIXTRAL = dict(model_type="pixtral", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
               image_size=32, patch_size=4)  # fmt: skip
TWELVE = dict(vision_config=PIXTRAL, text_config=BASE | dict(model_type="mistral", head_dim=24, sliding_window=None),
              image_token_index=IMAGE, vision_feature_layer=-1, vision_feature_select_strategy="full")  # fmt: skip
THREE = TWELVE | dict(vision_feature_layer=-2, tie_word_embeddings=False, multimodal_projector_bias=True)
THREE.pop("vision_feature_select_strategy")
BOTH = dict(vision_config=PIXTRAL | dict(hidden_act="silu", rope_parameters=dict(rope_type="axial", rope_theta=100.0)),
            text_config=BASE | dict(model_type="ministral3", head_dim=24, rope_parameters=TUNED),
            image_token_index=IMAGE)  # fmt: skip
SIGLIP = dict(model_type="siglip_vision_model", hidden_size=32, intermediate_size=48, num_hidden_layers=2,
              num_attention_heads=2, image_size=16, patch_size=4)  # fmt: skip
POOLED = LLAVA | dict(vision_config=SIGLIP, vision_feature_select_strategy="full", vision_feature_layer=-1)
TILED = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, image_size=16, patch_size=4,
             projector_input_dim=40, projector_output_dim=40, vision_output_dim=40,
             rope_parameters=dict(rope_type="default", rope_theta=100.0))  # fmt: skip
FOUR = dict(text_config=LLAMA4 | dict(model_type="llama4_text", num_experts_per_tok=2, interleave_moe_layer_step=2),
            vision_config=TILED, image_token_index=IMAGE)  # fmt: skip
# The window is shorter than an image, whose tokens see each other.
GEMMA = BASE | dict(model_type="gemma3_text", head_dim=24, query_pre_attn_scalar=20, sliding_window=5,
                    num_hidden_layers=3, layer_types=[WINDOW, WINDOW, FULL])  # fmt: skip
SQUARE = dict(text_config=GEMMA, vision_config=SIGLIP | dict(image_size=24, vision_use_head=False), mm_tokens_per_image=9,
              image_token_index=IMAGE, boi_token_index=113, eoi_token_index=114)  # fmt: skip
TILES = dict(
    text_config=BASE | dict(model_type="cohere2", logit_scale=0.25, sliding_window=8, num_hidden_layers=4),
    vision_config=SIGLIP, image_token_index=IMAGE, alignment_intermediate_size=72, downsample_factor=2,
)  # fmt: skip
ANY_SIZE = dict(
    text_config=BASE | dict(model_type="gemma4_text", head_dim=16, global_head_dim=32, sliding_window=8,
                            num_hidden_layers=4, layer_types=[WINDOW, FULL, WINDOW, FULL], num_kv_shared_layers=2,
                            vocab_size_per_layer_input=128, hidden_size_per_layer_input=12, rms_norm_eps=0.01),
    vision_config=dict(model_type="gemma4_vision", hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16,
                       num_attention_heads=2, num_key_value_heads=1, patch_size=4, pooling_kernel_size=2,
                       position_embedding_size=24, use_clipped_linears=True),
    image_token_id=IMAGE, boi_token_id=113, eoi_token_id=114,
)  # fmt: skip
BOTH_WAYS = ANY_SIZE | dict(
    vision_config=ANY_SIZE["vision_config"] | dict(standardize=True, use_clipped_linears=False),
    text_config=ANY_SIZE["text_config"] | dict(use_bidirectional_attention="vision", pad_token_id=120),
)
TINY = {
    "llama4": Entry("Llama4Config", FOUR, "Llama4ForConditionalGeneration", loss=3),
    "gemma4": Entry("Gemma4Config", BOTH_WAYS, "Gemma4ForConditionalGeneration"),
    "gemma4:causal": Entry("Gemma4Config", ANY_SIZE, "Gemma4ForConditionalGeneration"),
    "aya_vision": Entry("AyaVisionConfig", TILES, "AyaVisionForConditionalGeneration"),
    "gemma3": Entry("Gemma3Config", SQUARE, "Gemma3ForConditionalGeneration"),
    "llava:siglip": Entry("LlavaConfig", POOLED, "LlavaForConditionalGeneration"),
    "llava": Entry("LlavaConfig", LLAVA, "LlavaForConditionalGeneration", wiring=True),
    "llava:full": Entry("LlavaConfig", ALL, "LlavaForConditionalGeneration"),
    "llava:pixtral": Entry("LlavaConfig", TWELVE, "LlavaForConditionalGeneration"),
    "mistral3": Entry("Mistral3Config", THREE, "Mistral3ForConditionalGeneration"),
    "mistral3:ministral3": Entry("Mistral3Config", BOTH, "Mistral3ForConditionalGeneration"),
}


def processor(name: str):
    """Make transformers' image processor of an entry, on pillow."""
    import importlib

    file, kind, values = PROCESSORS[name]
    if callable(file):
        return Ours(file, values)
    module = importlib.import_module(f"transformers.models.{file}")
    if hasattr(module, "_SUPPORTED_SOFT_TOKENS"):  # of at least 70, with which rows here would be long
        module._SUPPORTED_SOFT_TOKENS = (*module._SUPPORTED_SOFT_TOKENS, FEW)
    return getattr(module, kind)(**values)


class Ours:
    """Stands for an image processor that does not load without torchvision: as `fdel.media` does it.

    tests/media compares that with the processor's own functions. `lay(settings, image)` gives the oracle's arrays.
    """

    def __init__(self, lay, values):
        self.lay, self.values = lay, values

    def save_pretrained(self, directory):
        self.directory = directory
        (directory / "preprocessor_config.json").write_text(json.dumps(self.values))

    def __call__(self, images, return_tensors):
        import torch

        from fdel.media import sight

        settings = sight.read(self.directory).settings
        every = [self.lay(settings, image) for image in images]
        return {k: torch.tensor(np.concatenate([one[k] for one in every])) for k in every[0]}


def tiled(settings, rgb):
    """Lay out Llama 4's tiles."""
    from fdel.media import tiles

    return {"pixel_values": tiles.pixels(settings, rgb)[0].transpose(0, 3, 1, 2)}


def in_rows(settings, rgb):
    """Lay out Kimi's patches, row by row."""
    from fdel.media import image, moonvit

    x = moonvit.pixels(settings, rgb)
    cut = image.patches(x, settings.patch)[0].reshape(-1, 3, settings.patch, settings.patch)
    grid = [[1, *(n // settings.patch for n in x.shape[:2])]]
    return {"pixel_values": cut, "image_grid_thw": np.array(grid)}


TOKENS = (
    "[IMG_BREAK] [IMG_END] [IMG_BEGIN] <|START_OF_IMG|> <|END_OF_IMG|> TILE_GLOBAL <image> TILE_1 TILE_2 TILE_3 TILE_4 "
    "<|image_start|> <|tile_x_separator|> <|tile_y_separator|> <|image|> <|image_end|>"
).split()
EDGE = dict(size=dict(shortest_edge=16), crop_size=dict(height=16, width=16))
OF_LLAVA = ("llava.image_processing_pil_llava", "LlavaImageProcessorPil")
OF_PIXTRAL = "pixtral.image_processing_pil_pixtral", "PixtralImageProcessorPil"
SQUARES = dict(size=dict(longest_edge=32), patch_size=dict(height=8, width=8))
FEW = 8
FEW_TOKENS = ("gemma4.image_processing_pil_gemma4", "Gemma4ImageProcessorPil",
           dict(patch_size=4, pooling_kernel_size=2, max_soft_tokens=FEW))  # fmt: skip
PROCESSORS = {
    "kimi_vl": (in_rows, "", dict(in_token_limit=24, patch_size=4, pad_input=True)),
    "llama4": (tiled, "", dict(size=dict(height=16, width=16), max_patches=4)),
    "gemma4": FEW_TOKENS,
    "gemma4:causal": FEW_TOKENS,
    "aya_vision": (
        "got_ocr2.image_processing_pil_got_ocr2",
        "GotOcr2ImageProcessorPil",
        dict(size=dict(height=16, width=16), crop_to_patches=True, max_patches=4),
    ),
    "gemma3": ("gemma3.image_processing_pil_gemma3", "Gemma3ImageProcessorPil", dict(size=dict(height=24, width=24))),
    "llava:siglip": (
        "siglip.image_processing_pil_siglip",
        "SiglipImageProcessorPil",
        dict(size=dict(height=16, width=16)),
    ),
    "llava": (*OF_LLAVA, EDGE),
    "llava:full": (*OF_LLAVA, EDGE | dict(do_pad=True)),
    "llava:pixtral": (*OF_PIXTRAL, SQUARES | dict(patch_size=dict(height=4, width=4), size=dict(longest_edge=20))),
    "mistral3": (*OF_PIXTRAL, SQUARES),
    "mistral3:ministral3": (*OF_PIXTRAL, SQUARES),
}
