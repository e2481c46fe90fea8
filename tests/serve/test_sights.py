"""Chats with images, and videos where a family takes them, through the whole server: what `forward` says of the same media.

tests/models compares that forward with transformers, tests/media what the host makes of files. Beside it stand
test_images.py (LLaVA), test_families_see.py (Qwen2-VL, Pixtral, Mistral 3), whose oracle is transformers' `generate`, and
test_films.py (Qwen3-Omni).
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fdel import text
from fdel.media import sight
from fdel.serve.engine import weights
from tests.models import tiny
from tests.serve import small, wire
from tests.serve.test_films import ask, clip, image, mp4, seen, wanted, words
from tests.serve.test_images import file, rgb, serving

pytest.importorskip("torch", reason="transformers saves the models")

PLACE, MOVING, BEGIN, END = "<picture>", "<film>", "<begin>", "<end>"
SPECIALS = ["<|im_start|>", "<|im_end|>", PLACE, MOVING, BEGIN, END, *tiny.sight.TOKENS]
IDS = {
    PLACE: ("image_token_index", "image_token_id", "media_placeholder_token_id"),
    MOVING: ("video_token_id",),
    BEGIN: ("boi_token_index", "boi_token_id", "vision_start_token_id", "image_start_token_id"),
    END: ("eoi_token_index", "eoi_token_id", "vision_end_token_id", "image_end_token_id"),
}
FILE = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 1024},
}
DEAR = pytest.mark.matrix
FAMILIES = [
    "glm4v",
    *(pytest.param(n, marks=DEAR) for n in (
        "gemma3",
        "llama4", "kimi_vl", "gemma4", "gemma4:causal", "aya_vision", "llava:siglip", "mistral3:ministral3", "glm4v_moe",
        "glm46v", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
    )),
]  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def eye(request, tmp_path_factory):
    """A tiny random model of a family, and a server of its files."""
    directory, entry = tmp_path_factory.mktemp("eye"), tiny.TINY[request.param]
    tok = text.train_bpe(wire.WORDS, small.VOCAB - 10, SPECIALS)
    ids = {key: tok.backend.token_to_id(token) for token, keys in IDS.items() for key in keys}
    values = json.loads(json.dumps(entry.values))
    values |= {key: ids[key] for key in values.keys() & ids.keys()}
    more = dict(vocab_size=small.VOCAB, max_position_embeddings=400, eos_token_id=small.EOS)
    more |= {k: small.VOCAB for k in ("vocab_size_per_layer_input",) if k in values["text_config"]}
    values["text_config"] |= more
    tiny.build(entry._replace(values=values)).save_pretrained(directory)
    text.save(tok, directory)
    if request.param in tiny.sight.PROCESSORS:
        tiny.sight.processor(request.param).save_pretrained(directory)
    else:
        (directory / "preprocessor_config.json").write_text(json.dumps(FILE))
    see = sight.read(directory)
    places = {"image": see.placeholder} | ({"video": see.video.placeholder} if see.video else {})
    cases = "".join(f"{{% elif p.type == '{k}' %}}{tok.backend.id_to_token(i)}" for k, i in places.items())
    parts = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}" + cases + "{% endif %}{% endfor %}"
    template = wire.TEMPLATE.replace("{{ m.content }}", parts)
    text.save(replace(tok, templates={"default": template}, eos_ids=(small.EOS,)), directory)
    with serving(directory, "omni") as found:
        yield SimpleNamespace(**vars(found), see=see, model=weights.load(directory))


@pytest.mark.slow
def test_answers_to_images_and_videos_are_those_of_forward(eye):
    """An image, two of other shapes, a video where there is one, beside text; each says something else than the others."""
    first, second, third = (file(rgb(i, *size)) for i, size in enumerate([(20, 30), (40, 17), (9, 50)]))
    contents = [
        [words("the weather in "), image(first), words("is fine")],
        [image(second), words("a music "), image(third), words("b")],
    ]
    if eye.see.video:
        contents.append([words("the music "), seen(mp4(clip(1))), words("a"), image(first)])
    answers = set()
    for content in contents:
        want, count = wanted(eye, content)
        got = ask(eye, content)
        assert got.choices[0].message.content == want and got.usage.prompt_tokens == count
        answers.add((want, count))
    assert len(answers) == len(contents)
    turned = [words("the weather in "), image(file(np.swapaxes(rgb(0, 20, 30), 0, 1))), words("is fine")]
    assert ask(eye, turned).choices[0].message.content == wanted(eye, turned)[0]
