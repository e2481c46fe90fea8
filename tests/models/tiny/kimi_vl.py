"""Kimi-VL, whose function transformers has as Kimi-K2.5's for images: the oracle has its weights under published names."""

import json

from .entry import BASE, DEEPSEEK, Entry
from .randomise import randomise
from .sight import IMAGE

TOWER = dict(model_type="moonvit", patch_size=4, init_pos_emb_height=3, init_pos_emb_width=3, num_attention_heads=2,
             num_hidden_layers=2, hidden_size=32, intermediate_size=48, merge_kernel_size=[2, 2])  # fmt: skip
KIMI = dict(text_config=BASE | DEEPSEEK | dict(model_type="deepseek_v3", n_group=1, topk_group=1), vision_config=TOWER,
            media_placeholder_token_id=IMAGE)  # fmt: skip
NAMES = {
    "lm_head.": "language_model.lm_head.", "model.language_model.": "language_model.model.",
    "model.vision_tower.patch_embed.": "vision_tower.patch_embed.", "model.vision_tower.": "vision_tower.encoder.",
    "model.mm_projector.": "multi_modal_projector.",
}  # fmt: skip
PARTS = {"pos_emb.position_embeddings": "pos_emb.weight", "encoder.layers.": "encoder.blocks.", "norm1.": "norm0.",
         "norm2.": "norm1.", "fc1.": "fc0.", "fc2.": "fc1.", "attn.proj.": "wo.", "in_proj.": "linear_1.",
         "out_proj.": "linear_2."}  # fmt: skip


def published(tensors, heads):
    """Give tensors of transformers' modules under the published names, or gradients of them."""
    import torch

    out, fused = {}, {}
    for name, x in tensors.items():
        before = next(b for b in NAMES if name.startswith(b))
        ours = NAMES[before] + name.removeprefix(before)
        if before != "model.language_model.":
            for theirs, part in PARTS.items():
                ours = ours.replace(theirs, part) if theirs in name.replace("model.vision_tower.", "encoder.") else ours
        stem, _, leaf = ours.partition(".attn.")
        if leaf:
            side = leaf[0]
            turned = x.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(x.shape)  # halves to neighbours
            fused.setdefault(f"{stem}.wqkv.{leaf.partition('.')[2]}", {})[side] = x if side == "v" else turned
        elif ".experts." in ours:
            stem, _, leaf = ours.rpartition(".")
            for i, one in enumerate(x):
                parts = dict(zip(("gate_proj", "up_proj"), one.chunk(2), strict=True))
                parts = parts if leaf == "gate_up_proj" else {leaf: one}
                out |= {f"{stem}.{i}.{part}.weight": y.clone() for part, y in parts.items()}
        else:
            out[ours] = x
    return out | {name: torch.cat([sides[i] for i in "qkv"]) for name, sides in fused.items()}


class Oracle:
    """Looks like a model of transformers, as far as the suite asks."""

    def __init__(self, values, seed):
        import torch
        import transformers

        self.values, tower = values, dict(values["vision_config"])
        for axis in ("height", "width"):
            tower[f"pos_emb_{axis}"] = tower.pop(f"init_pos_emb_{axis}")
        tower.pop("model_type")
        cfg = transformers.Kimi_K25Config(
            text_config=values["text_config"], vision_config=tower, projection_hidden_size=tower["hidden_size"],
            image_token_id=values["media_placeholder_token_id"], tie_word_embeddings=False,
        )  # fmt: skip
        torch.manual_seed(seed)
        self.model = transformers.Kimi_K25ForConditionalGeneration._from_config(
            cfg, attn_implementation="eager", dtype=torch.float32
        ).eval()
        randomise(self.model, seed)
        self.zero_grad, self.heads = self.model.zero_grad, tower["num_attention_heads"]

    def __call__(self, *tokens, **kwargs):
        return self.model(*tokens, **kwargs)

    def save_pretrained(self, directory, **_):
        from safetensors.torch import save_file

        tensors = published(self.model.state_dict(), self.heads)
        save_file({k: x.contiguous() for k, x in tensors.items()}, directory / "model.safetensors")
        config = {"model_type": "kimi_vl", "architectures": ["KimiVLForConditionalGeneration"]} | self.values
        (directory / "config.json").write_text(json.dumps(config))

    def named_parameters(self):
        """Give names and what has the gradients."""
        from types import SimpleNamespace

        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return [(name, SimpleNamespace(grad=g)) for name, g in published(grads, self.heads).items()]


TINY = {"kimi_vl": Entry("", KIMI, "", loss=3, make=Oracle)}
