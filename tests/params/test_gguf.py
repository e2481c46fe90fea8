"""GGUF files of mixtures of experts, of scaled rotary positions, and their tokenizers, against transformers."""

import dataclasses
import itertools
import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from fdel import cli, models, params, text
from fdel.params import CheckpointError, gguf_blocks
from fdel.params.tensor import Tensor
from fdel.serve.engine import weights
from tests.params.test_published import gguf_file

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch (extra `test`)")
transformers = pytest.importorskip("transformers")
SIZES = dict(vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, num_experts_per_tok=2, max_position_embeddings=64)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
PARTS = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}  # fmt: skip


def eights(x: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Blocks of q8_0, and what they stand for."""
    groups = x.reshape(-1, 32)
    scale = (np.abs(groups).max(1) / 127).astype(np.float16)
    q = np.clip(np.round(groups / scale[:, None]), -127, 127).astype(np.int8)
    raw = b"".join(s.tobytes() + row.tobytes() for s, row in zip(scale, q, strict=True))
    return raw, (q * scale[:, None].astype(np.float32)).reshape(x.shape)


def tensors(oracle, pairs: bool) -> dict:
    """Name and lay out a model's weights as llama.cpp's converter does; experts in q8_0, written back to the model."""
    found, state = {}, oracle.state_dict()
    put = lambda name, x: found.update({name: ("f32", x.shape, x.astype(np.float32).tobytes())})
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in state.items():
        x, (stem, _, leaf) = tensor.numpy(), name.rpartition(".") if "experts" not in name else (name, "", "")
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        if stem in outer:
            put(f"{outer[stem]}.weight", x)
        elif part.startswith("mlp.experts"):
            raw, plain = eights(x)
            tensor.copy_(torch.tensor(plain))
            down = part.endswith("down_proj")
            for kind, y in [("down", plain)] if down else zip(("gate", "up"), np.split(plain, 2, 1), strict=True):
                found[f"blk.{layer}.ffn_{kind}_exps.weight"] = "q8_0", y.shape, eights(y)[0]
        else:
            if pairs and part in ("self_attn.q_proj", "self_attn.k_proj"):  # neighbours turn together there
                x = x.reshape(-1, 2, 8, 64).swapaxes(1, 2).reshape(x.shape)
            put(f"blk.{layer}.{PARTS[part]}.{leaf}", x)
    return found


# Where a block's half-precision factors are.
HALVES = {"q4_0": [0], "q4_1": [0, 2], "q5_0": [0], "q5_1": [0, 2], "q8_0": [0], "q2_k": [80, 82], "q3_k": [108],
          "q4_k": [0, 2], "q5_k": [0, 2], "q6_k": [208]}  # fmt: skip


def fives(block: bytes, begins: int) -> list[float]:
    """Read a block of q5_0 (begins 2) or q5_1 (4) as dequantize_row_q5_0 and _q5_1 of ggml-quants.c do."""
    d, m = np.frombuffer(block[:4], "<f2").astype(float)
    high = int.from_bytes(block[begins : begins + 4], "little")
    low = block[begins + 4 :]
    q = [(low[i % 16] >> 4 * (i // 16)) % 16 + 16 * (high >> i & 1) for i in range(32)]
    return [d * (x - 16) if begins == 2 else d * x + m for x in q]


@pytest.mark.parametrize("number,label,numbers,width", [(k, *v) for k, v in gguf_blocks.BLOCKS.items()])
def test_the_blocks_of_a_type_are_those_of_transformers(number, label, numbers, width, tmp_path):
    """Random bytes of three rows and two blocks, to 1e-6 of the largest; five bits in blocks of 32 by ggml's formula."""
    from transformers.integrations.gguf.dequant import dequantize

    rng = np.random.default_rng(number)
    x = rng.integers(0, 256, (3, 2, width), np.uint8)
    for at in HALVES[label]:
        x[..., at : at + 2] = rng.uniform(0.01, 0.02, (3, 2, 1)).astype(np.float16).view(np.uint8)
    if label.startswith("q5_") and numbers == 32:
        want = np.array([[fives(block.tobytes(), width - 20) for block in row] for row in x]).reshape(3, -1)
    else:
        want = dequantize(torch.tensor(x.reshape(3, -1)), number).numpy().reshape(3, -1)
    raw = x.reshape(3, -1)

    def readinto(out: np.ndarray, at: int) -> None:
        out[...] = raw.reshape(-1)[at : at + out.size]

    found = {f"w:{label}": Tensor(raw.shape, raw.dtype, tmp_path, readinto), "v:q4_k": None}
    assert gguf_blocks.blocks(found, "v.weight", {}) is None
    leaf = jax.tree.map(lambda t: t.read(), gguf_blocks.blocks(found, "w", {}), is_leaf=lambda t: isinstance(t, Tensor))
    leaf = dataclasses.replace(leaf, inputs=want.shape[1:])
    assert [*found] == ["v:q4_k"] and leaf.shape == want.shape
    bits = leaf.values.size * 8 / want.size
    assert bits == (4 if label in ("q4_0", "q4_1", "q2_k", "q3_k", "q4_k") else 8)
    got = params.dequantize({"w": leaf}, jnp.float32)["w"]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


WORDS = ["low lower lowest slow slowest, 12345 and don't", "the cat's mats, and 42 hats; naïve café"]
WORDS = [*WORDS, "日本語 ü", "a  b\n\n c"] * 3
TEXTS = ["the lowest cat", "  two  spaces", "don't DON'T I'LL 123456", "naïve 日本 🙂 ü", "a<|end|>b\r\n x", ""]
TEXTS += ["<unk>", "lo\tw"]


def byte_level(pre: str) -> tuple[dict, text.Tokenizer]:
    """What llama.cpp's converter writes of a BPE over bytes, and the tokenizer that it was."""
    tok = text.train_bpe(WORDS, 320, special_tokens=["<|end|>", "<|bos|>"])
    model, vocab = json.loads(tok.json)["model"], tok.backend.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    types = [3 if t in ("<|end|>", "<|bos|>", "<|endoftext|>") else 1 for t in tokens]
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges, "token_type": types, "eos_token_id": 0,
            "bos_token_id": vocab["<|bos|>"], "eot_token_id": vocab["<|end|>"]}, tok  # fmt: skip


def sentencepiece() -> dict:
    """What it writes of a SentencePiece model: scores of its pieces, and no merges."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace("▁", "first", split=False)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False)
    backend.train_from_iterator(WORDS, trainer)
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    scores = [-float(i) for i in range(len(tokens))]
    return {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types, "bos_token_id": 1,
            "eos_token_id": 2, "unknown_token_id": 0}  # fmt: skip


@pytest.mark.parametrize("kind", ["gpt-2", "llama-bpe", "qwen2", "tekken", "llama"])
def test_the_tokenizer_of_a_file_is_that_of_transformers(kind, tmp_path):
    """Ids of texts with all that is odd, and the texts that they are; where texts begin; what ends them; templates."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

    said, tok = (sentencepiece(), None) if kind == "llama" else byte_level(kind)
    template = "{{ messages[0].content }}"
    keys = {"general.architecture": "llama", "tokenizer.chat_template": template}
    gguf_file(tmp_path, keys | {f"tokenizer.ggml.{k}": v for k, v in said.items()}, {})
    found = text.load(tmp_path / "model.gguf")
    arch, described, config = get_gguf_tokenizer(str(tmp_path / "model.gguf"))
    oracle, _ = convert_gguf_tokenizer(arch, described)
    for s in [*WORDS, *TEXTS]:
        ids = text.encode(found, s, special=False)
        assert ids == oracle.encode(s, add_special_tokens=False).ids, s
        if kind == "gpt-2":
            assert ids == text.encode(tok, s, special=False)
        assert text.decode(found, ids, skip_special=False) == oracle.decode(ids, skip_special_tokens=False), s
        detokenizer, streamed = text.Detokenizer(found, skip_special=False), ""
        for i in ids:
            detokenizer, more = text.step(detokenizer, [i])
            streamed += more
        assert streamed + text.flush(detokenizer) == text.decode(found, ids, skip_special=False)
    begins = kind in ("llama", "llama-bpe")  # as llama.cpp has it where the file says nothing
    bos = [said["bos_token_id"]] if begins else []
    assert text.encode(found, "the cat") == bos + text.encode(found, "the cat", special=False)
    assert found.eos_ids == ((2,) if kind == "llama" else (0, said["eot_token_id"]))
    assert found.templates["default"] == template and found.special["eos_token"] == config["eos_token"]
    (tmp_path / "saved").mkdir()
    text.save(found, tmp_path / "saved")
    again = text.load(tmp_path / "saved")
    assert [text.encode(again, s) for s in TEXTS] == [text.encode(found, s) for s in TEXTS]
    assert again.eos_ids == found.eos_ids
    said |= {"add_bos_token": not begins, "add_eos_token": True}
    gguf_file(tmp_path, keys | {f"tokenizer.ggml.{k}": v for k, v in said.items()}, {})
    bos = [] if begins else [said["bos_token_id"]]
    found = text.load(tmp_path)
    inner = text.encode(found, "the cat", special=False)
    assert text.encode(found, "the cat") == [*bos, *inner, said["eos_token_id"]]


@pytest.mark.parametrize(
    "change,message",
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; understood are gpt2, llama"),
        ({"pre": "kimi-k2"}, "tokenizer.ggml.pre is 'kimi-k2'; understood are llama3"),
        ({"merges": ["a b c"]}, "merges: expected pairs"),
        ({"token_type": [1, 2]}, "token_type has 2 items for"),
        ({"eos_token_id": 10**6}, "eos_token_id is 1000000 of"),
        ({"tokens": ["x" * 2000]}, "expected texts of at most 1024"),
        ({"tokens": 3}, "expected texts"),
    ],
)
def test_tokenizers_that_are_not_understood_are_named(change, message, tmp_path):
    said = byte_level("gpt-2")[0] | change
    gguf_file(tmp_path, {f"tokenizer.ggml.{k}": v for k, v in said.items()}, {})
    with pytest.raises(ValueError, match=message):
        text.load(tmp_path)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3moe"])
def test_experts_and_scaled_positions(kind, tmp_path):
    """Logits are those of transformers' model, to 1e-5 of the largest: Llama 3.1's factors as a tensor, yarn as keys."""
    torch.manual_seed(0)
    if kind == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=3, sliding_window=None, rope_parameters=LLAMA3)
        oracle, arch = transformers.MixtralForCausalLM(config).eval(), "llama"
    else:
        config = transformers.Qwen3MoeConfig(**SIZES, num_experts=3, moe_intermediate_size=32, norm_topk_prob=True,
                                             head_dim=16, rope_parameters=YARN)  # fmt: skip
        oracle, arch = transformers.Qwen3MoeForCausalLM(config).eval(), "qwen3moe"
    keys = {
        "embedding_length": 64, "feed_forward_length": 96, "block_count": 2, "context_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 1e4, "expert_count": 3, "expert_used_count": 2,
    }  # fmt: skip
    with torch.no_grad():
        for p in oracle.parameters():
            p.normal_(1 if p.ndim == 1 else 0, 0.2)
        found = tensors(oracle, pairs=arch == "llama")
        tokens = np.random.default_rng(0).integers(0, 32, (2, 40))
        want = oracle(torch.tensor(tokens)).logits.numpy()
    if kind == "mixtral":
        inv = 1e4 ** (-np.arange(0, 16, 2) / 16)
        factors = inv / oracle.model.rotary_emb.inv_freq.numpy()
        found["rope_freqs.weight"] = "f32", (8,), factors.astype(np.float32).tobytes()
    else:
        keys |= {"attention.key_length": 16, "expert_feed_forward_length": 32, "rope.scaling.type": "yarn",
                 "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}  # fmt: skip
    keys = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in keys.items()}
    gguf_file(tmp_path, keys, found)
    model = models.load(tmp_path, dtype=jnp.float32)
    got = jax.jit(lambda p: model.family.forward(p, tokens, model.cfg)[0])(model.params)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    assert model.params["layers"]["experts"]["down"].format == "int8"
    odd = {
        "rope.scaling of type 'yarn', attn_factor 2.0": {
            f"{arch}.rope.scaling.type": "yarn",
            f"{arch}.rope.scaling.attn_factor": 2.0,
        },
        "rope.scaling of type 'linear', without a factor": {f"{arch}.rope.scaling.type": "linear"},
    }
    for message, more in odd.items():
        gguf_file(tmp_path, {k: v for k, v in keys.items() if "scaling" not in k} | more, found)
        with pytest.raises(CheckpointError, match=message):
            models.load(tmp_path)
    wrong = struct.pack("<8f", *[0.0] * 8)
    for name, x, message in (
        ("rope_freqs", ("f32", (8,), wrong), "understood are positive f32"),
        ("blk.0.ffn_up_exps", ("f32", (64,), bytes(256)), "is no matrix for each expert"),
    ):
        gguf_file(tmp_path, keys | {f"{arch}.rope.scaling.type": "none"}, found | {f"{name}.weight": x})
        with pytest.raises(CheckpointError, match=message):
            models.load(tmp_path)


def test_a_qwen_2_by_the_path_of_its_file(tmp_path, capsys):
    """Biases of queries, keys and values; `models.load`, `fdel info` and `fdel convert` of the file itself, as one would
    serve it; what is converted has its tokenizer. 1e-5 of the largest logit."""
    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if k != "num_experts_per_tok"} | {"vocab_size": 330}
    oracle = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)).eval()
    tokens = np.random.default_rng(0).integers(0, 330, (2, 20))
    with torch.no_grad():
        for p in oracle.parameters():
            p.normal_(1 if p.ndim == 1 else 0, 0.2)
        found, want = tensors(oracle, pairs=False), oracle(torch.tensor(tokens)).logits.numpy()
    keys = {
        "embedding_length": 64, "feed_forward_length": 96, "block_count": 2, "context_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    said = {"general.architecture": "qwen2"} | {f"qwen2.{key}": value for key, value in keys.items()}
    gguf_file(tmp_path, said | {f"tokenizer.ggml.{k}": v for k, v in byte_level("qwen2")[0].items()}, found)
    (tmp_path / "other.gguf").write_bytes(b"")  # so that the directory has no only one
    file = tmp_path / "model.gguf"
    model = models.load(file, dtype=jnp.float32)
    got = model.family.forward(model.params, tokens, model.cfg)[0]
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    assert models.hearing(params.resolve(file)) is None is models.pooling.read(file)  # what `fdel serve` asks first
    served = weights.load(file, dtype=jnp.float32).params
    np.testing.assert_array_equal(served["layers"][1]["q"], model.params["layers"]["q"][1])
    assert cli.main(["info", str(file)]) == 0 and "family" in (out := capsys.readouterr().out) and "qwen2" in out
    assert cli.main(["convert", str(file), str(tmp_path / "out")]) == 0
    there = models.load(tmp_path / "out", dtype=jnp.float32)
    np.testing.assert_array_equal(there.family.forward(there.params, tokens, there.cfg)[0], got)
    assert text.encode(text.load(tmp_path / "out"), "the lowest") == text.encode(text.load(file), "the lowest")
    with pytest.raises(FileNotFoundError, match="no model.safetensors|no config.json"):
        models.load(tmp_path)


def write_split(directory, keys: dict, tensors: dict, sizes: tuple[int, ...], **changed) -> list:
    """Write a model in several files as llama.cpp's gguf-split does: all keys in the first, with so many tensors each."""
    names = iter(tensors)
    files = []
    for i, n in enumerate(sizes):
        said = {"split.no": i, "split.count": len(sizes), "split.tensors.count": len(tensors)}
        some = {name: tensors[name] for name in itertools.islice(names, n)}
        gguf_file(directory, (keys if i == 0 else {}) | said | changed.get(f"file_{i}", {}), some, vocabulary=i == 0)
        files.append(directory / f"tiny-{i + 1:05}-of-{len(sizes):05}.gguf")
        (directory / "model.gguf").rename(files[-1])
    return files


def llama_in_parts() -> tuple[dict, dict]:
    """Keys and tensors of a Llama of one layer, with a tokenizer."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (330, 64), "output_norm": (64,), "output": (330, 64), "blk.0.attn_q": (64, 64),
              "blk.0.attn_k": (32, 64), "blk.0.attn_v": (32, 64), "blk.0.attn_output": (64, 64), "blk.0.attn_norm": (64,),
              "blk.0.ffn_norm": (64,), "blk.0.ffn_gate": (96, 64), "blk.0.ffn_up": (96, 64),
              "blk.0.ffn_down": (64, 96)}  # fmt: skip
    tensors = {}
    for name, shape in shapes.items():
        x = rng.normal(len(shape) == 1, 0.2, shape).astype(np.float32)
        plain = len(shape) == 1 or name == "token_embd"
        tensors[f"{name}.weight"] = ("f32", shape, x.tobytes()) if plain else ("q8_0", shape, eights(x)[0])
    keys = {"embedding_length": 64, "feed_forward_length": 96, "block_count": 1, "context_length": 64,
            "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6}  # fmt: skip
    said = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in keys.items()}
    return said | {f"tokenizer.ggml.{k}": v for k, v in byte_level("llama-bpe")[0].items()}, tensors


def same(a, b) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_model_in_several_files(tmp_path, capsys):
    """By any of its files or their directory it is that of one file: arrays, tokenizer, `fdel info`, `fdel convert`."""
    keys, tensors = llama_in_parts()
    gguf_file(tmp_path / "whole", keys, tensors)
    want = models.load(tmp_path / "whole")
    ids = text.encode(text.load(tmp_path / "whole"), "the lowest cat")
    for name, sizes in ("even", (5, 4, 3)), ("first_empty", (0, 12)):  # gguf-split --no-tensor-first-split
        files = write_split(tmp_path / name, keys, tensors, sizes)
        for path in (tmp_path / name, *files):
            model = models.load(path)
            assert model.cfg == want.cfg and text.encode(text.load(path), "the lowest cat") == ids
            same(model.params, want.params)
    assert cli.main(["info", str(files[1])]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "path" not in line]
    assert cli.main(["info", str(tmp_path / "whole")]) == 0
    assert [s for s in capsys.readouterr().out.splitlines() if "path" not in s] == said and said
    assert cli.main(["convert", str(files[1]), str(tmp_path / "out")]) == 0
    same(models.load(tmp_path / "out").params, params.dequantize(want.params, jnp.float32))
    assert text.encode(text.load(tmp_path / "out"), "the lowest cat") == ids
    served = weights.load(files[0]).params
    same(served["layers"][0]["q"], jax.tree.map(lambda x: x[0], want.params["layers"]["q"]))


def test_files_that_do_not_make_one_model(tmp_path):
    keys, tensors = llama_in_parts()
    made = iter(range(100))

    def refused(message, change=lambda files: None, reads_tokenizer=False, **changed):
        files = write_split(tmp_path / str(next(made)), keys, tensors, (5, 4, 3), **changed)
        change(files)
        for file in [f for f in files if f.is_file()]:
            with pytest.raises(CheckpointError, match=message):
                models.load(file)
            if reads_tokenizer:
                text.load(file)
                continue
            with pytest.raises(ValueError, match=message):
                text.load(file)

    refused("tiny-00001-of-00003.gguf, tiny-00003-of-00003.gguf not found; the model is in 3 files",
            lambda files: [files[0].unlink(), files[2].unlink()])  # fmt: skip
    refused("tiny-00002-of-00003.gguf: split.no is 2, split.count 3; expected split.no 1, split.count 3",
            lambda files: files[1].write_bytes(files[2].read_bytes()))  # fmt: skip
    refused("split.no is 1, split.count 2; expected split.no 1, split.count 3", file_1={"split.count": 2})
    refused(
        "tiny-00003-of-00003.gguf: split.tensors.count is 11, but the files hold 12", file_2={"split.tensors.count": 11}
    )
    refused("split.tensors.count is 'x', but", file_0={"split.tensors.count": "x"})
    put = lambda old, new: lambda files: files[2].write_bytes(files[2].read_bytes().replace(old, new))
    refused("tiny-00003-of-00003.gguf: blk.0.attn_q.weight is in tiny-00001-of-00003.gguf too",
            put(b"blk.0.ffn_up", b"blk.0.attn_q"))  # fmt: skip
    refused("tiny-00003-of-00003.gguf: blk.0.ffn_gate.weight occurs twice", put(b"ffn_down", b"ffn_gate"))
    refused("tiny-00003-of-00003.gguf: blk.0.ffn_down.weight ends past the file",
            lambda files: files[2].write_bytes(files[2].read_bytes()[:-9]), reads_tokenizer=True)  # fmt: skip
    other = write_split(tmp_path / "two", keys, tensors, (6, 6))
    (tmp_path / "two" / "other.gguf").write_bytes(other[0].read_bytes())
    with pytest.raises(CheckpointError, match="other.gguf: split.no is 0, split.count 2; expected a name as model-"):
        models.load(tmp_path / "two" / "other.gguf")
    with pytest.raises(FileNotFoundError, match="of its GGUF models, give the path of one"):
        models.load(tmp_path / "two")


def test_files_that_the_gguf_package_splits(tmp_path):
    """llama.cpp's own writer, by tensors and by bytes: the model of one file."""
    gguf = pytest.importorskip("gguf", reason="llama.cpp's Python package writes what is read here")
    keys, tensors = llama_in_parts()
    gguf_file(tmp_path / "whole", keys, tensors)
    want = models.load(tmp_path / "whole")
    whole = gguf.GGUFReader(tmp_path / "whole" / "model.gguf")
    for name, how in ("by_tensors", {"split_max_tensors": 5}), ("by_bytes", {"split_max_size": 30_000}):
        (tmp_path / name).mkdir()
        writer = gguf.GGUFWriter(tmp_path / name / "tiny.gguf", "llama", small_first_shard=name == "by_bytes", **how)
        for key, value in whole.fields.items():
            if not key.startswith(("GGUF.", "general.architecture")):
                kind = value.types[0]
                writer.add_key_value(key, value.contents(), kind, value.types[-1] if len(value.types) > 1 else None)
        for t in whole.tensors:
            writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        files = sorted((tmp_path / name).iterdir())
        assert len(files) > 2
        for path in (tmp_path / name, files[-1]):
            model = models.load(path)
            assert model.cfg == want.cfg and text.encode(text.load(path), "a b") == text.encode(
                text.load(tmp_path / "whole"), "a b"
            )
            same(model.params, want.params)
