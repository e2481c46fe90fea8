"""Damaged and hostile files of quantised models end in an error that names them, never in a traceback of another kind."""

import json
import random
import struct

import numpy as np
import pytest

from fdel import models
from fdel.models import ConfigError
from fdel.params import CheckpointError
from tests.params.test_published import BASE, KINDS, checkpoint, gguf_file, gguf_llama, save

HOSTILE = [None, -1, 0, 1, 3, 2**40, 0.5, float("nan"), "", "32", [], [0, 0], [1e9, -1], {}, {"weights": 3}, True]


def outcome(path) -> str:
    """Load a directory: "loaded", or the first line of what was wrong."""
    try:
        models.load(path, stacked=False)
    except (CheckpointError, ConfigError) as e:
        return str(e)
    return "loaded"


def test_damaged_headers_of_gguf_files(tmp_path):
    """200 headers with bytes, lengths or numbers of other values: none ends in another kind of error."""
    gguf_llama(tmp_path)
    file = tmp_path / "model.gguf"
    raw, rng, said = file.read_bytes(), random.Random(0), []
    length = raw.index(b"output_norm.weight") + 60
    for _ in range(200):
        at, damaged = rng.randrange(4, length), bytearray(raw)
        extreme = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**63, 2**64 - 1]))
        damaged[at : at + 8] = rng.choice([bytes([rng.randrange(256)]), extreme, b"", b"\xff"]).ljust(
            8, raw[at : at + 1]
        )
        file.write_bytes(damaged)
        said.append(outcome(tmp_path))
    assert sum(s != "loaded" for s in said) > 150 and len(set(said)) > 50


@pytest.mark.parametrize(("key", "value", "message"), [
    ("general.alignment", 0, "alignment is 0; expected a power of two"),
    ("general.alignment", 24, "alignment is 24"),
    ("llama.attention.head_count", "4", "attention.head_count is '4'; understood is one number"),
    ("llama.attention.head_count", 0, "attention.head_count is 0"),
    ("llama.attention.head_count", 6, r"attn_q.weight of shape \[256, 144\] has no rows for 6 heads"),
])  # fmt: skip
def test_values_of_gguf_headers(key, value, message, tmp_path):
    gguf_llama(tmp_path, {key: value})
    with pytest.raises(CheckpointError, match=message):
        models.load(tmp_path)


def test_names_of_gguf_tensors_that_are_none(tmp_path):
    keys = {"general.architecture": "llama"} | {f"llama.{k}": 4 for k in (
        "embedding_length", "feed_forward_length", "block_count", "attention.head_count", "context_length")}  # fmt: skip
    for name in ("x", "blk.0", "blk.attn_q", "token_embd.weight"):
        gguf_file(tmp_path, keys | {"llama.attention.layer_norm_rms_epsilon": 1e-5}, {name: ("f32", (), bytes(4))})
        with pytest.raises(CheckpointError, match=r"no matrix token_embd.weight"):
            models.load(tmp_path)


@pytest.mark.parametrize("kind", ["gptq", "awq", "ct_4", "ct_int8", "fp8_blocks", "nf4_double", "bnb_int8"])
def test_hostile_quantization_configs(kind, tmp_path):
    """Every key of the config with every value of `HOSTILE`."""
    checkpoint(tmp_path, kind)
    how, said = KINDS[kind][1], set()
    for key in how:
        for value in HOSTILE:
            config = BASE | {"quantization_config": how | {key: value}}
            (tmp_path / "config.json").write_text(json.dumps(config))
            said.add(outcome(tmp_path))
    assert len(said) > 2


@pytest.mark.slow
def test_hostile_states_of_nf4(tmp_path):
    """Every key of the JSON that bitsandbytes keeps beside a matrix with every value of `HOSTILE`."""
    tensors, _ = checkpoint(tmp_path, "nf4_double")
    name = next(k for k in tensors if "q_proj.weight.quant_state." in k)
    state, said = json.loads(tensors[name].tobytes()), set()
    for key in state:
        for value in HOSTILE:
            raw = np.frombuffer(json.dumps(state | {key: value}).encode(), np.uint8)
            save(tmp_path, tensors | {name: raw}, BASE | {"quantization_config": KINDS["nf4_double"][1]})
            said.add(outcome(tmp_path))
    assert len(said) > 5
