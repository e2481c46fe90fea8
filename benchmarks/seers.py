"""Random models that see, saved by transformers, for see.py: of each family a tiny one, and one of about 125M parameters.

Towers and language models have the proportions of published ones (Qwen2.5-VL-3B, Qwen3-VL-2B, Gemma 3 of 270M with the
tower of the larger ones), LLaVA those of its first version, all with fewer and narrower layers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fdel import text

VOCAB, CONTEXT = 512, 1024
SHOWN = "{{ '<image>' if p.type == 'image' else p.text }}"
TEMPLATE = "{% for m in messages %}{% for p in m.content %}" + SHOWN + "{% endfor %}{% endfor %}"
WORDS = "the weather in Paris is fine, the music is not; a b c d e f g h i j k l m n o p q r s t u v w x y z"
NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
MARKS = ("<start>", "<end>", "<image>", "<video>")  # around an image in a prompt, and for it


@dataclass(frozen=True)
class Shape:
    """Sizes: width, layers, heads, ffn of the language model and of the tower; and what a family has besides."""

    text: tuple[int, int, int, int]
    vision: tuple[int, int, int, int]
    image: int  # pixels along a side of the images that are shown one at a time
    patch: int
    more: dict[str, Any]  # of the language model
    tower: dict[str, Any]


def rope(*section: int, **more: Any) -> dict[str, Any]:
    return dict(rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[*section], **more))


SHAPES: dict[str, dict[str, Shape]] = {
    "llava": {
        "tiny": Shape((64, 2, 4, 96), (32, 2, 2, 48), 32, 8, {}, {}),
        "125m": Shape((768, 12, 12, 2048), (384, 12, 6, 1536), 224, 16, {}, {}),
    },
    "qwen2_5_vl": {
        "tiny": Shape((64, 2, 4, 96), (32, 4, 2, 48), 64, 4, dict(num_key_value_heads=2) | rope(2, 3, 3),
                      dict(window_size=16, fullatt_block_indexes=[1, 3])),
        "125m": Shape((576, 18, 9, 3072), (320, 16, 4, 856), 336, 14, dict(num_key_value_heads=3) | rope(8, 12, 12),
                      dict(window_size=112, fullatt_block_indexes=[3, 7, 11, 15])),
    },
    "qwen3_vl": {
        "tiny": Shape((64, 4, 4, 96), (32, 4, 2, 48), 64, 4, dict(num_key_value_heads=2, head_dim=16)
                      | rope(4, 2, 2, mrope_interleaved=True),
                      dict(num_position_embeddings=16, deepstack_visual_indexes=[0, 2])),
        "125m": Shape((768, 12, 6, 2304), (384, 12, 6, 1536), 320, 16, dict(num_key_value_heads=3, head_dim=128)
                      | rope(24, 20, 20, mrope_interleaved=True),
                      dict(num_position_embeddings=2304, deepstack_visual_indexes=[3, 6, 9])),
    },
    "gemma3": {
        "tiny": Shape((64, 3, 4, 96), (32, 2, 2, 48), 32, 4, dict(num_key_value_heads=2, head_dim=16), {}),
        "125m": Shape((640, 18, 4, 2048), (288, 12, 4, 1076), 448, 14, dict(num_key_value_heads=1, head_dim=256), {}),
    },
}  # fmt: skip


def make(directory: str, family: str, size: str) -> Any:
    """Save a random model with its image processor and a tokenizer, and return it."""
    import torch

    s = SHAPES[family][size]
    tok = text.train_bpe([WORDS], 290, MARKS)
    ids = {name: tok.backend.token_to_id(name) for name in MARKS}
    inner = dict(zip(NAMES, s.text, strict=True), vocab_size=VOCAB, max_position_embeddings=CONTEXT,
                 eos_token_id=VOCAB - 1) | s.more  # fmt: skip
    torch.manual_seed(0)
    oracle = {"llava": _llava, "gemma3": _gemma}.get(family, _qwen)(directory, family, s, inner, ids).eval()
    oracle.save_pretrained(directory)
    fields = {"templates": {"default": TEMPLATE}, "eos_ids": (VOCAB - 1,)}
    text.save(text.Tokenizer(**{**vars(tok), **fields}), directory)
    return oracle


def _llava(directory: str, family: str, s: Shape, inner: dict, ids: dict[str, int]) -> Any:
    import torch
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration

    vision = dict(zip(NAMES, s.vision, strict=True), model_type="clip_vision_model", image_size=s.image,
                  patch_size=s.patch, projection_dim=64)  # fmt: skip
    cfg = LlavaConfig(vision_config=vision, text_config=inner | {"model_type": "llama"}, image_token_index=ids["<image>"],
                      image_seq_length=(s.image // s.patch) ** 2)  # fmt: skip
    CLIPImageProcessor(size={"shortest_edge": s.image}, crop_size=_square(s)).save_pretrained(directory)
    return LlavaForConditionalGeneration._from_config(cfg, dtype=torch.float32)


def _gemma(directory: str, family: str, s: Shape, inner: dict, ids: dict[str, int]) -> Any:
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    vision = dict(zip(NAMES, s.vision, strict=True), model_type="siglip_vision_model", image_size=s.image,
                  patch_size=s.patch, vision_use_head=False)  # fmt: skip
    cfg = Gemma3Config(vision_config=vision, text_config=inner | dict(model_type="gemma3_text", sliding_window=512),
                       image_token_index=ids["<image>"], boi_token_index=ids["<start>"], eoi_token_index=ids["<end>"],
                       mm_tokens_per_image=(s.image // s.patch // 4) ** 2)  # fmt: skip
    Gemma3ImageProcessorPil(size=_square(s)).save_pretrained(directory)
    return Gemma3ForConditionalGeneration._from_config(cfg, dtype=torch.float32)


def _qwen(directory: str, family: str, s: Shape, inner: dict, ids: dict[str, int]) -> Any:
    import torch
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    width, layers, heads, ffn = s.vision
    vision = dict(hidden_size=width, depth=layers, num_heads=heads, intermediate_size=ffn, patch_size=s.patch,
                  spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=s.text[0]) | s.tower  # fmt: skip
    name = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    tokens = dict(vision_start_token_id=ids["<start>"], vision_end_token_id=ids["<end>"], image_token_id=ids["<image>"],
                  video_token_id=ids["<video>"])  # fmt: skip
    cfg = getattr(transformers, f"{name}Config")(vision_config=vision, text_config=inner, **tokens)
    pixels = dict(shortest_edge=(2 * s.patch) ** 2, longest_edge=1280 * (2 * s.patch) ** 2)
    half = {} if family == "qwen2_5_vl" else dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    Qwen2VLImageProcessorPil(patch_size=s.patch, size=pixels, **half).save_pretrained(directory)
    return getattr(transformers, f"{name}ForConditionalGeneration")._from_config(cfg, dtype=torch.float32)


def _square(s: Shape) -> dict[str, int]:
    return {"height": s.image, "width": s.image}


def processor(directory: str, family: str) -> Any:
    """Read transformers' image processor: that on pillow, without torchvision."""
    import importlib

    kinds = {"llava": ("llava", "LlavaImageProcessorPil"), "gemma3": ("gemma3", "Gemma3ImageProcessorPil")}
    name, kind = kinds.get(family, ("qwen2_vl", "Qwen2VLImageProcessorPil"))
    module = importlib.import_module(f"transformers.models.{name}.image_processing_pil_{name}")
    return getattr(module, kind).from_pretrained(directory)


def inputs(family: str, prompts: list[list[int]], seen: list[Any], image: int) -> dict[str, Any]:
    """Give what transformers' model takes of prompts, padded on the left, and of what its processor gave of images."""
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    found = {k: torch.tensor(np.concatenate([np.asarray(x[k]) for x in seen])) for k in seen[0] if k != "num_crops"}
    if family != "llava":
        found["token_type_ids" if family == "gemma3" else "mm_token_type_ids"] = ((ids == image) & (mask > 0)).int()
    return {"input_ids": ids, "attention_mask": mask, **found}
