"""GGUF files of mixtures of experts and of scaled rotary positions, against transformers' models of the same weights."""

import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models
from fdel.params import CheckpointError
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
         "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp"}  # fmt: skip


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
        x, stem = tensor.numpy(), name.removesuffix(".weight")
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
            put(f"blk.{layer}.{PARTS[part]}.weight", x)
    return found


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
