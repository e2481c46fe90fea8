"""Files of NVIDIA's ModelOpt, against what ModelOpt itself makes of their bytes."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from fdel import models, params
from fdel.ops.weights import dense
from fdel.params import Param
from fdel.params.spec import normal

# Of q_proj of a tiny Llama that ModelOpt 0.47.0 exported: a row's bytes, its scales, a second scale; the dequantised row.
NVFP4 = (
    "ed37aaf610edddefc96122c823fc3ed0", "757e", "0x1.25ff4ep-12",
    "932733be6fdf6ebe9327b33e9327b33d6fdf6ebd6fdf6ebd6fdf6e3e9327b3be000000006fdfee3c932733be6fdf6ebe932733be932733be9327b3be"
    "6fdf6ebeb29f80bdb29f80beb29f803db29f003fb29f003eb29f003e00000000b29f80be8bef403eb29f003eb29f80be8bef40bfb29f00bf8bef403e"
    "000000008befc0be",
)  # fmt: skip
FP8 = (
    "6670f45b736aeada726be3da6574f4db", "0x1.ed877ap-10",
    "45ebd73dbdc3763ece12b9be92a6293d92a6a93e563a1a3e563a1abe563a1abd563a9a3e92a6293e92a6a9bd563a1abd0a7fc83dce12b93ece12b9be"
    "92a629bd",
)  # fmt: skip


def loaded(path, algorithm: str, tensors: dict, shape: tuple[int, int]) -> np.ndarray:
    """Read one matrix, "w.weight", of a file with these tensors; as an array."""
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    spec = {"w": Param("ffn embed", shape, normal(1.0), "w.weight")}
    how = {"quant_method": "modelopt", "quant_algo": algorithm}
    return np.asarray(dense(params.load(spec, path, quantization=how)["w"], jnp.float32))


def raw(text: str, dtype, *shape: int) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), dtype).reshape(shape)


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
def test_numbers_of_nvfp4_that_modelopt_wrote(algorithm, tmp_path):
    """One row of 32 inputs, 1e-7 of the greatest."""
    weight, scale, second, want = NVFP4
    tensors = {
        "w.weight": raw(weight, np.uint8, 1, 16),
        "w.weight_scale": raw(scale, ml_dtypes.float8_e4m3fn, 1, 2),
        "w.weight_scale_2": np.array(float.fromhex(second), np.float32),
    }
    want = raw(want, "<f4", 1, 32)
    assert np.abs(loaded(tmp_path, algorithm, tensors, (1, 32)) - want).max() <= 1e-7 * np.abs(want).max()


def test_numbers_of_fp8_that_modelopt_wrote(tmp_path):
    """A scale per tensor, or per output: equal."""
    weight, scale, want = FP8
    values, scale = raw(weight, ml_dtypes.float8_e4m3fn, 1, 16), np.array(float.fromhex(scale), np.float32)
    want = raw(want, "<f4", 1, 16)
    got = loaded(tmp_path, "FP8", {"w.weight": values, "w.weight_scale": scale}, (1, 16))
    np.testing.assert_array_equal(got, want)
    twice = {"w.weight": np.repeat(values, 2, 0), "w.weight_scale": scale * np.float32([1, 2])}
    got = loaded(tmp_path, "FP8_PER_CHANNEL_PER_TOKEN", twice, (2, 16))
    np.testing.assert_array_equal(got, np.concatenate([want, 2 * want]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["FP8_DEFAULT", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4_DEFAULT", "W4A16_NVFP4"])
def test_what_modelopt_exports(kind, tmp_path):
    """A tiny Llama with random weights: every matrix is what ModelOpt's own tensors dequantise to, 1e-7 of the greatest."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    mtq = pytest.importorskip(
        "modelopt.torch.quantization", reason="NVIDIA's ModelOpt (PyPI: nvidia-modelopt) is the oracle"
    )
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    torch.manual_seed(0)
    oracle = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, architectures=["LlamaForCausalLM"])).eval()  # fmt: skip
    with torch.no_grad():
        for p in oracle.parameters():
            p.normal_(1 if p.ndim == 1 else 0, 0.2)
    mtq.quantize(oracle, getattr(mtq, f"{kind}_CFG"), lambda m: m(torch.randint(0, 32, (2, 16))))
    export_hf_checkpoint(oracle, export_dir=str(tmp_path))
    from safetensors.torch import load_file

    stored, model = load_file(tmp_path / "model.safetensors"), models.load(tmp_path)
    got = params.dequantize(model.params, jnp.float32)["layers"]
    for part, path in ("self_attn.q", "q"), ("self_attn.o", "o"), ("mlp.gate", "gate"), ("mlp.down", "down"):
        weight, scale = (stored[f"model.layers.0.{part}_proj.{x}"] for x in ("weight", "weight_scale"))
        shape = (weight.shape[0], weight.shape[1] * (2 if "NVFP4" in kind else 1))
        if "NVFP4" in kind:
            more = {"double_scale": stored[f"model.layers.0.{part}_proj.weight_scale_2"], "block_sizes": {-1: 16}}
            tensor = NVFP4QTensor(torch.Size(shape), torch.float32, weight)
        else:
            more, tensor = {}, FP8QTensor(torch.Size(shape), torch.float32, weight)
            scale = scale if scale.ndim == 0 else scale[:, None]
        want = tensor.dequantize(torch.float32, scale=scale, **more).numpy()
        assert np.abs(got[path][0].reshape(shape) - want).max() <= 1e-7 * np.abs(want).max(), part
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["producer"]["name"] == "modelopt"
