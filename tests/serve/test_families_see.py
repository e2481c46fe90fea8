"""Chats with images of Qwen2-VL, Pixtral and Mistral 3 through the whole server: transformers' greedy answers."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from fdel import text
from tests.serve import small, wire
from tests.serve.test_images import TEMPLATE, file, rgb, said, serving, url

torch = pytest.importorskip("torch", reason="needs the torch extra")
transformers = pytest.importorskip("transformers")
PIL = pytest.importorskip("PIL.Image", reason="needs the media extra")
pytestmark = [pytest.mark.slow, pytest.mark.matrix]

SPECIALS = ["<|im_start|>", "<|im_end|>", "<image>", "<begin>", "[IMG_BREAK]", "[IMG_END]"]
SIZES = [(20, 30), (40, 17), (9, 50)]


def qwen(values: dict, ids: dict) -> tuple:
    """transformers' image processor, its config, and how an image stands in a prompt."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=256, max_pixels=1024
    )
    values |= dict(image_token_id=ids["<image>"], vision_start_token_id=ids["<begin>"], video_token_id=small.VOCAB - 1,
                   vision_end_token_id=small.VOCAB - 2)  # fmt: skip
    return processor, values, lambda found, i: [ids["<image>"]] * (int(found["image_grid_thw"][i].prod()) // 4)


def pixtral(values: dict, ids: dict) -> tuple:
    """The same, of a run with ends of rows."""
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    unit = 4 * values.get("spatial_merge_size", 1 if values["text_config"]["model_type"] == "mistral" and values.get(
        "vision_feature_select_strategy") else 2)  # fmt: skip
    processor = PixtralImageProcessorPil(size=dict(longest_edge=32), patch_size=dict(height=unit, width=unit))

    def run(found, i):
        rows, columns = (int(n) // unit for n in found["image_sizes"][i])
        line = [ids["<image>"]] * columns
        return ([*line, ids["[IMG_BREAK]"]] * rows)[:-1] + [ids["[IMG_END]"]]

    return processor, values | dict(image_token_index=ids["<image>"]), run


KINDS = {"qwen2_vl": qwen, "llava:pixtral": pixtral, "mistral3": pixtral}


@pytest.fixture(scope="module", params=KINDS)
def eye(request, tmp_path_factory):
    """transformers' tiny model with its processor, and a server of its files."""
    from tests.models import tiny

    directory, entry = tmp_path_factory.mktemp("eye"), tiny.TINY[request.param]
    tok = text.train_bpe(wire.WORDS, small.VOCAB - 20, SPECIALS)
    ids = {s: tok.backend.token_to_id(s) for s in SPECIALS}
    more = dict(vocab_size=small.VOCAB, max_position_embeddings=400, eos_token_id=small.EOS)
    values = json.loads(json.dumps(entry.values)) | {"text_config": entry.values["text_config"] | more}
    processor, values, run = KINDS[request.param](values, ids)
    cfg = getattr(transformers, entry.config)(**values)
    kind = getattr(transformers, entry.model)
    oracle = kind._from_config(cfg, attn_implementation="eager", dtype=torch.float32).eval()
    tiny.randomise(oracle, 0, ())
    oracle.save_pretrained(directory)
    template = TEMPLATE.replace("<image>", "<begin><image>")
    text.save(text.Tokenizer(**{**vars(tok), "templates": {"default": template}, "eos_ids": (small.EOS,)}), directory)
    processor.save_pretrained(directory)
    with serving(directory, "eye") as found:
        yield SimpleNamespace(**vars(found), oracle=oracle, processor=processor, run=run, token=ids["<image>"])


def wanted(eye, messages: list, arrays: list, most: int = 10) -> tuple[list[int], int]:
    """What transformers writes greedily, and the number of tokens of its prompt."""
    content = [{"type": "image"} if p["type"] == "image_url" else p for p in messages[0]["content"]]
    tok = eye.served.tokenizer
    shown = text.render_chat(tok, [{"role": "user", "content": content}], add_generation_prompt=True)
    found = eye.processor([PIL.fromarray(x) for x in arrays], return_tensors="pt") if arrays else {}
    ids, at = [], 0
    for t in text.encode(tok, shown, special=False):
        ids += eye.run(found, at) if t == eye.token else [t]
        at += t == eye.token
    tokens = torch.tensor([ids])
    if "image_grid_thw" in found:
        found["mm_token_type_ids"] = (tokens == eye.token).int()
    with torch.no_grad():
        out = eye.oracle.generate(
            input_ids=tokens, **found, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=most,
            eos_token_id=small.EOS, pad_token_id=0,
        )  # fmt: skip
    answer = out[0, len(ids) :].tolist()
    return answer[: answer.index(small.EOS)] if small.EOS in answer else answer, len(ids)


def test_chats_are_answered_as_transformers_does(eye):
    """One image, two of other shapes, none, and all of them at once; chunks of 32 tokens cut images."""
    images = [rgb(i, *size) for i, size in enumerate(SIZES)]
    one = (said("the weather in ", url(file(images[0])), "is fine"), images[:1])
    two = (said(url(file(images[1])), "a music ", url(file(images[2])), "b"), images[1:])
    none = (said("the weather"), [])
    answers = {}
    for messages, arrays in (one, two, none):
        want, count = wanted(eye, messages, arrays)
        got = eye.client.chat.completions.create(model="eye", messages=messages, temperature=0, max_tokens=10)
        assert got.choices[0].message.content == text.decode(eye.served.tokenizer, want)
        assert got.usage.prompt_tokens == count
        answers[got.choices[0].message.content] = count
    assert len(answers) == 3 and max(answers.values()) > 32
    turned = said("the weather in ", url(file(np.swapaxes(images[0], 0, 1))), "is fine")
    want, _ = wanted(eye, turned, [np.swapaxes(images[0], 0, 1)])
    chunks = eye.client.chat.completions.create(model="eye", messages=turned, temperature=0, max_tokens=10, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text.decode(eye.served.tokenizer, want)
