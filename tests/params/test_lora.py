"""Adapters against numpy in float64, and against PEFT on tiny transformers models, in both directions."""

import json
import math
import re
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fdel.models import gpt2, heads, llama, roberta
from fdel.ops.einsum import einsum
from fdel.ops.embed import embed
from fdel.ops.weights import LowRank, Quantized, dense
from fdel.params import kept, lora
from fdel.params.hf_layout import hf_names, layout
from fdel.params.peft import load_peft, save_peft
from fdel.params.quantize import change, quantize
from fdel.params.spec import Param, named_leaves, normal, stack, unstack
from fdel.params.tensor import CheckpointError
from fdel.train import losses

RNG = np.random.default_rng(0)
KEY = jax.random.key(0)


MERGE, EINSUM, EMBED = jax.jit(lora.merge), jax.jit(einsum, static_argnums=0), jax.jit(embed)


def param(axes: str, file: str, *shape: int, module: str = "layers.{layers}.") -> Param:
    return Param(axes, shape, normal(1.0), module + axes.replace(" ", "_") + ".weight", file)


def add(params: Any, rank: int, alpha: float, where: str, spec: Any, **options: Any) -> Any:
    return lora.add(params, rank, alpha, where, key=KEY, spec=spec, **options)


LAYER = {
    "norm": param("embed", "", 12),
    "q": param("heads head_dim embed", "(heads head_dim) embed", 2, 5, 12),
    "k": param("kv_heads head_dim embed", "(kv_heads head_dim) embed", 2, 5, 12),
    "o": param("embed heads head_dim", "embed (heads head_dim)", 12, 2, 5),
    "up": param("experts ffn embed", "", 3, 4, 12),
}
SPEC = {"embed": param("vocab embed", "", 7, 12, module="m."), "layers": stack(LAYER, "layers", range(2))}
PARAMS = jax.tree.map(lambda p: jnp.array(RNG.standard_normal(p.shape), jnp.float32), SPEC)


def randomised(params: Any) -> Any:
    """The same adapters with every factor random."""
    trainable, frozen = lora.split(params)
    return lora.join(jax.tree.map(lambda x: jnp.array(RNG.standard_normal(x.shape), x.dtype), trainable), frozen)


def test_add_changes_nothing_yet() -> None:
    """b is zero, a within 1/sqrt(inputs) as torch's Linear."""
    got = add(PARAMS, 4, 8, "", SPEC)
    assert {k for k, w in got["layers"].items() if isinstance(w, LowRank)} == {"q", "k", "o", "up"}
    shapes = {"q": ((2, 4, 12), (2, 2, 5, 4)), "o": ((2, 4, 2, 5), (2, 12, 4)), "up": ((2, 3, 4, 12), (2, 3, 4, 4))}
    for name, inputs in ("q", 12), ("o", 10), ("up", 12):
        w = got["layers"][name]
        assert (w.a.shape, w.b.shape) == shapes[name] and w.a.dtype == w.b.dtype == jnp.float32
        assert not w.b.any() and 0.8 / math.sqrt(inputs) < jnp.abs(w.a).max() <= 1 / math.sqrt(inputs)
        assert (w.scale == 2).all() and w.scale.shape == w.a.shape[: w.a.ndim - (3 if name == "o" else 2)]
    assert got["embed"].a.any() and not got["embed"].b.any() and got["embed"].b.shape == (7, 4)
    for tree in MERGE(got), lora.unload(got):
        chex.assert_trees_all_equal(tree, PARAMS)
    assert float(add(PARAMS, 4, 8, r"\.q$", SPEC, rslora=True)["layers"]["q"].scale[0]) == 4


def test_keys_come_from_paths() -> None:
    """Which other matrices are adapted changes no factor; different matrices and keys give different ones."""
    every, one = add(PARAMS, 4, 8, "", SPEC), add(PARAMS, 4, 8, r"\.q$", SPEC)
    assert isinstance(one["layers"]["o"], jax.Array)
    np.testing.assert_array_equal(every["layers"]["q"].a, one["layers"]["q"].a)
    assert not np.allclose(every["layers"]["q"].a, every["layers"]["k"].a)
    other = lora.add(PARAMS, 4, 8, r"\.q$", key=jax.random.key(1), spec=SPEC)
    assert not np.allclose(one["layers"]["q"].a, other["layers"]["q"].a)


@pytest.mark.parametrize("listed", [False, True])
def test_merge(listed: bool) -> None:
    """W + scale b a, in float64; scale differs between layers."""
    params = randomised(add(PARAMS, 3, 6, "", SPEC))
    q = params["layers"]["q"]
    params["layers"]["q"] = LowRank(q.base, q.a, q.b, jnp.array([2.0, -0.5]))
    merged = MERGE(unstack(params) if listed else params)
    flat = {"q": "lri,lnhr,l->lnhi", "o": "lrnh,ldr,l->ldnh", "up": "leri,leor,le->leoi"}
    for name, subscripts in flat.items():
        w = params["layers"][name]
        a, b, scale = (np.asarray(x, np.float64) for x in (w.a, w.b, w.scale))
        got = np.stack([p[name] for p in merged["layers"]]) if listed else merged["layers"][name]
        np.testing.assert_allclose(got, w.base + np.einsum(subscripts, a, b, scale), atol=1e-5)
    w = params["embed"]
    np.testing.assert_allclose(merged["embed"], w.base + 2 * np.asarray(w.b, np.float64) @ w.a, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["", "int8", "nf4"])
def test_training_reaches_adapters_only(format: str) -> None:
    """QLoRA: gradients have the structure of the trainable half, and descent moves the adapted weight to a target."""
    base = quantize(PARAMS, format, "q", spec=SPEC) if format else PARAMS
    params = lora.add(base, 8, 8, r"\.q$", key=KEY, spec=SPEC)
    trainable, frozen = lora.split(params)
    assert len(jax.tree.leaves(trainable)) == 2
    assert jax.tree.structure(lora.join(trainable, frozen)) == jax.tree.structure(params)
    chex.assert_trees_all_equal(lora.join(trainable, frozen), params)
    x = jnp.array(RNG.standard_normal((64, 12)), jnp.float32)
    rank_one = np.einsum("i,nh->nhi", RNG.standard_normal(12), RNG.standard_normal((2, 5))) / 4
    target = einsum("td,nhd->tnh", x, dense(jax.tree.map(lambda w: w[0], params["layers"]["q"])) + rank_one)

    @jax.jit
    def step(t: Any) -> tuple[Any, jax.Array]:
        def loss(t: Any) -> jax.Array:
            q = jax.tree.map(lambda w: w[0], lora.join(t, frozen)["layers"]["q"])
            return jnp.mean((einsum("td,nhd->tnh", x, q) - target) ** 2)

        value, grad = jax.value_and_grad(loss)(t)
        return jax.tree.map(lambda w, g: w - 0.5 * g, t, grad), value

    losses = []
    for _ in range(200):
        trainable, value = step(trainable)
        losses.append(float(value))
    assert losses[-1] < 1e-3 * losses[0]
    merged = lora.merge(lora.join(trainable, frozen))["layers"]["q"]
    assert isinstance(merged, jax.Array) and merged.dtype == jnp.float32
    np.testing.assert_array_equal(dense(base["layers"]["q"])[1], merged[1])  # the second layer was not used


def test_a_vector_of_inputs() -> None:
    """The gate of a shared expert is a matrix of one output to PEFT: alone, merged, and chosen by tokens."""
    draw = lambda *shape: jnp.array(RNG.standard_normal(shape), jnp.float32)
    w, x = LowRank(draw(12), draw(3, 12), draw(3), jnp.float32(0.5)), draw(5, 12)
    want = x @ (w.base + 0.5 * np.asarray(w.b, np.float64) @ w.a)
    np.testing.assert_allclose(EINSUM("td,d->t", x, w), want, atol=1e-5)
    np.testing.assert_allclose(x @ dense(w), want, atol=1e-5)
    served = lora.choose(lora.stack({"gate": w.base}, {1: {"gate": w}}, 2, 4), jnp.array([1, -1, 1, 0, 1]))
    there = np.array([True, False, True, False, True])
    np.testing.assert_allclose(EINSUM("td,d->t", x, served["gate"]), np.where(there, want, x @ w.base), atol=1e-5)


def test_errors() -> None:
    adapted = lora.add(PARAMS, 2, 2, r"\.q$", key=KEY, spec=SPEC)
    with pytest.raises(ValueError, match="layers.q has an adapter"):
        lora.add(adapted, 2, 2, key=KEY, spec=SPEC)
    with pytest.raises(ValueError, match="rank=0"):
        lora.add(PARAMS, 0, 2, key=KEY, spec=SPEC)
    with pytest.raises(ValueError, match="no adapter"):
        lora.split(PARAMS)
    with pytest.raises(ValueError, match="matches no matrix"):
        lora.add(PARAMS, 2, 2, "norm", key=KEY, spec=SPEC)


# ---- PEFT ----------------------------------------------------------------------------------------------------------

SIZES = {"vocab_size": 31, "bos_token_id": 0, "eos_token_id": 1}
LLAMA = SIZES | {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "head_dim": 6}  # fmt: skip
GPT2 = SIZES | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8}
ROBERTA = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
           "max_position_embeddings": 12, "pad_token_id": 1}  # fmt: skip
EINSUMS = {
    "q": "td,nhd->tnh", "k": "td,nhd->tnh", "v": "td,nhd->tnh", "o": "tnh,dnh->td", "gate": "td,fd->tf",
    "up": "td,fd->tf", "down": "tf,df->td", "head": "td,vd->tv",
}  # fmt: skip


def base_model(family: str) -> tuple[Any, dict, dict]:
    """A transformers model with every weight random, its spec, and the same weights as params."""
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    transformers = pytest.importorskip("transformers", reason="needs the torch extra")
    pytest.importorskip("peft", reason="needs the torch extra")
    kind, sizes, module = {"llama": ("Llama", LLAMA, llama), "gpt2": ("GPT2", GPT2, gpt2)}[family]
    config = getattr(transformers, kind + "Config")(**sizes)
    torch.manual_seed(0)
    model = getattr(transformers, kind + ("LMHeadModel" if family == "gpt2" else "ForCausalLM"))(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p)
    spec = module.spec(module.Config.from_hf(config.to_dict()))
    return model, spec, params_of(spec, model)


def params_of(spec: dict, model: Any) -> dict:
    state = {name: x.detach().numpy() for name, x in model.state_dict().items()}

    def one(p: Param) -> jax.Array:
        arrays = [layout(p).read(state[name]) for name in hf_names(p)]
        return jnp.array(np.stack(arrays).reshape(p.shape))

    return jax.tree.map(one, spec)


def compare(spec: dict, params: dict, model: Any) -> int:
    """Compare what every adapted matrix computes with what PEFT's module of its name does; how many there were."""
    import torch

    compared = 0
    for path, p in named_leaves(spec):
        w = dict(named_leaves(params, is_leaf=lambda x: isinstance(x, LowRank)))[path]
        for i, name in enumerate(hf_names(p) if isinstance(w, LowRank) else ()):
            one = jax.tree.map(lambda x, i=i: x[i], w) if p.stacked else w
            module = model.get_submodule("base_model.model." + name.removesuffix(".weight"))
            if path == "embed":
                x = RNG.integers(0, p.shape[0], 5)
                got, want = EMBED(one, jnp.array(x)), module(torch.tensor(x))
            else:
                inputs = one.a.shape[1:]
                x = RNG.standard_normal((5, *inputs)).astype(np.float32)
                got = EINSUM(EINSUMS[path.rpartition(".")[2]], jnp.array(x), one)
                want = module(torch.tensor(x.reshape(5, -1)))
                if getattr(module, "bias", None) is not None:
                    want = want - module.bias
                if p.part:
                    want = want[:, p.part[0] : p.part[0] + got[0].size]
            want = want.detach().numpy().reshape(got.shape)
            np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), err_msg=name)
            compared += 1
    return compared


ADAPTERS = {  # family, settings of PEFT's LoraConfig, number of matrices that it adapts
    "all": ("llama", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
                                         "lm_head", "embed_tokens"]}, 16),
    "patterns": ("llama", {"target_modules": ["q_proj", "o_proj"], "rank_pattern": {"layers.1.self_attn.q_proj": 2},
                           "alpha_pattern": {"o_proj": 5, "layers.0.self_attn.q_proj": 7}}, 4),
    "rslora, one layer": ("llama", {"target_modules": ["v_proj"], "layers_to_transform": [1], "use_rslora": True}, 2),
    "fused, transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}, 12),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "listed"), [(name, name.startswith("fused")) for name in ADAPTERS] + [("rslora, one layer", True)]
)
def test_from_peft(name: str, listed: bool, tmp_path: Path) -> None:
    """Modules compute what PEFT's do (1e-5 of the largest value); weights of up to 10 merge to PEFT's within 1e-5."""
    family, settings, count = ADAPTERS[name]
    model, spec, params = base_model(family)
    import peft
    import torch

    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, **settings)).eval()
    for p in adapted.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p)
    adapted.save_pretrained(tmp_path)
    spec, params = (unstack(spec), unstack(params)) if listed else (spec, params)
    got = load_peft(spec, params, tmp_path)
    found = compare(spec, got, adapted)
    assert found == (1 if listed and "one layer" in name else count)
    want = params_of(spec, adapted.merge_and_unload())
    chex.assert_trees_all_close(MERGE(got), want, rtol=1e-7, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "where", "rslora", "whole"),
    [
        ("llama", "", False, None),
        ("llama", "q|down", True, r"^layers\.(v|mlp_norm|gate)$|^norm$"),
        ("gpt2", "layers", True, None),
        ("gpt2", r"\.(q|v)$", False, None),
        ("gpt2", r"\.(q|k|v)$", False, "_norm"),
    ],
)
def test_to_peft(family: str, where: str, rslora: bool, whole: str | None, tmp_path: Path) -> None:
    """PEFT reads what was written: the same modules, the same merged weights; and reading it back gives the same.

    So what stands `whole` beside the adapters, in all layers.
    """
    model, spec, params = base_model(family)
    import peft

    params = randomised(add(params, 3, 8, where, spec, rslora=rslora))
    q = params["layers"]["q"]
    params["layers"]["q"] = LowRank(q.base, q.a, q.b, q.scale * jnp.array([0.5, -1]))  # other than that of k and v
    start = lora.unload(params)
    if whole:
        other = lambda path, w: w + jnp.asarray(RNG.standard_normal(w.shape), w.dtype) if re.search(whole, path) else w
        params = change(other, params)
    save_peft(spec, params, tmp_path, base_name="org/base", whole=whole)
    merged = MERGE(params)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path).eval()
    assert compare(spec, params, adapted) > 0
    want = params_of(spec, adapted.merge_and_unload())
    chex.assert_trees_all_close(merged, want, rtol=1e-7, atol=1e-5)
    back = MERGE(load_peft(spec, start, tmp_path))
    chex.assert_trees_all_close(back, merged, rtol=1e-7, atol=1e-5)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/base"
    assert config["r"] == (9 if "k" in where else 6 if "v" in where else 3) or where == "layers"
    assert all("." not in name for name in config["target_modules"]) or family == "gpt2"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "roberta"])
def test_a_head_that_is_trained_whole(name: str, tmp_path: Path) -> None:
    """PEFT's logits from the files, and ours from PEFT's; the head of two layers too (1e-5; seen 1e-6)."""
    torch, transformers = (pytest.importorskip(x, reason="needs the torch extra") for x in ("torch", "transformers"))
    peft = pytest.importorskip("peft", reason="needs the torch extra")
    torch.manual_seed(0)
    kind, sizes = ("Llama", LLAMA | {"pad_token_id": 30}) if name == "llama" else ("Roberta", ROBERTA)
    config = getattr(transformers, kind + "Config")(**sizes, num_labels=3)
    model = getattr(transformers, kind + "ForSequenceClassification")(config).eval()
    torch.nn.utils.vector_to_parameters(torch.randn(sum(p.numel() for p in model.parameters())) / 4, model.parameters())
    family = {"llama": llama, "roberta": roberta}[name]
    cfg = family.Config.from_hf(config.to_dict())
    spec = heads.spec(family, cfg, "sequence", 3)
    base = params_of(spec, model)
    trained, frozen = lora.split(randomised(add(base, 2, 4, r"\.(q|v)$", spec)), heads.WHOLE)
    trained["sequence"] = jax.tree.map(lambda x: jnp.array(RNG.standard_normal(x.shape), x.dtype), trained["sequence"])
    assert jax.tree.structure(frozen["sequence"]).num_leaves == 0
    ours = lora.join(trained, frozen)
    save_peft(spec, ours, tmp_path, whole=heads.WHOLE, task_type="SEQ_CLS")
    adapted = peft.PeftModel.from_pretrained(model, tmp_path).eval()
    tokens = RNG.integers(2, 30, (3, 5))
    with torch.no_grad():
        want = adapted(torch.tensor(tokens)).logits.numpy()
    score = jax.jit(losses.score_rows(family, cfg))
    np.testing.assert_allclose(score(ours, {"tokens": tokens}), want, atol=1e-5)
    adapted.save_pretrained(tmp_path / "peft")
    back = load_peft(spec, base, tmp_path / "peft")
    np.testing.assert_allclose(score(back, {"tokens": tokens}), want, atol=1e-5)
    chex.assert_trees_all_equal(load_peft(spec, base, tmp_path), ours)


def test_modules_that_are_kept_whole() -> None:
    """The outermost of which all is kept; a list of modules is none to PEFT."""
    every = {"a.b.0.weight", "a.b.1.weight", "a.b.1.bias", "a.c.weight", "d.weight"}
    assert kept.modules({"a.b.0.weight", "d.weight"}, every) == ["a.b.0", "d"]
    assert kept.modules({"a.b.0.weight", "a.b.1.weight", "a.b.1.bias"}, every) == ["a.b.0", "a.b.1"]
    assert kept.modules(every - {"d.weight"}, every) == ["a"]


def test_onto_a_quantised_base(tmp_path: Path) -> None:
    params = randomised(lora.add(PARAMS, 2, 4, r"q|o", key=KEY, spec=SPEC))
    save_peft(SPEC, params, tmp_path)
    got = load_peft(SPEC, quantize(PARAMS, "nf4", "q|o", spec=SPEC), tmp_path)
    assert isinstance(got["layers"]["q"].base, Quantized)
    np.testing.assert_array_equal(got["layers"]["o"].a, params["layers"]["o"].a)


def test_files_that_are_refused(tmp_path: Path) -> None:
    params = lora.add(PARAMS, 2, 4, r"\.q$", key=KEY, spec=SPEC)
    with pytest.raises(FileNotFoundError, match="no adapter_config.json"):
        load_peft(SPEC, PARAMS, tmp_path)
    save_peft(SPEC, params, tmp_path)
    with pytest.raises(ValueError, match="layers.q has an adapter"):
        load_peft(SPEC, params, tmp_path)
    smaller = {"layers": stack({"o": LAYER["o"]}, "layers", range(2))}
    with pytest.raises(CheckpointError, match=r"layers.0.heads_head_dim_embed.lora_A.weight has no place in the spec"):
        load_peft(smaller, {"layers": {"o": PARAMS["layers"]["o"]}}, tmp_path)
    other = {
        "layers": stack({"q": param("heads head_dim embed", "(heads head_dim) embed", 3, 5, 12)}, "layers", range(2))
    }
    with pytest.raises(CheckpointError, match=r"lora_B.weight \(10, 2\): expected \(2, 12\), \(15, 2\)"):
        load_peft(other, {"layers": {"q": jnp.zeros((2, 3, 5, 12))}}, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for odd in (
        {"use_dora": True},
        {"init_lora_weights": "pissa"},
        {"peft_type": "LOHA"},
        {"bias": "all"},
        {"new": [1]},
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | odd))
        with pytest.raises(CheckpointError, match=f"{next(iter(odd))}=.* is not supported"):
            load_peft(SPEC, PARAMS, tmp_path)
    with pytest.raises(ValueError, match="params have no adapter"):
        save_peft(SPEC, PARAMS, tmp_path)
    with pytest.raises(ValueError, match="no place for adapters of layers.up"):
        save_peft(SPEC, lora.add(PARAMS, 2, 4, "up", key=KEY, spec=SPEC), tmp_path)


# ---- files of strangers ----------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path):
    """A good adapter of rank 2 of the matrices q; a function writes it anew with other tensors and other settings."""
    params = randomised(lora.add(PARAMS, 2, 4, r"\.q$", key=KEY, spec=SPEC))
    save_peft(SPEC, params, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    good = load_file(tmp_path / "adapter_model.safetensors")

    def write(change: Any = None, **settings: Any) -> Path:
        save_file({**good, **(change or {})}, tmp_path / "adapter_model.safetensors")
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | settings))
        return tmp_path

    return write


NAME = "base_model.model.layers.1.heads_head_dim_embed.lora_{}.weight"
A, B = NAME.format("A"), NAME.format("B")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [A, B])
def test_values_that_are_not_finite_are_refused(file, name: str, value: float) -> None:
    """By the name of their tensor; also those that float32 cannot hold."""
    shape = {A: (2, 12), B: (10, 2)}[name]
    x = np.ones(shape)
    x[-1, -1] = value
    for bad in (x.astype(np.float32), x, np.full(shape, 1e300)):
        with pytest.raises(CheckpointError, match=rf"1 problem\n  {name} holds values that are not finite"):
            load_peft(SPEC, PARAMS, file({name: bad}))


def test_ranks_have_a_limit(file) -> None:
    assert load_peft(SPEC, PARAMS, file(), max_rank=2)["layers"]["q"].a.shape == (2, 2, 12)
    with pytest.raises(CheckpointError, match=r"lora_B.weight \(10, 2\): rank 2; the most is 1 here \(max_lora_rank\)"):
        load_peft(SPEC, PARAMS, file(), max_rank=1)
    none = {A: np.zeros((0, 12), np.float32), B: np.zeros((10, 0), np.float32)}
    with pytest.raises(CheckpointError, match=r"lora_A.weight \(0, 12\), .*: expected \(1, 12\), \(10, 1\)"):
        load_peft(SPEC, PARAMS, file(none))
    with pytest.raises(CheckpointError, match="int32; expected floating-point"):
        load_peft(SPEC, PARAMS, file({A: np.zeros((2, 12), np.int32)}))
    flat = {A: np.zeros(24, np.float32), B: np.ones((), np.float32)}
    with pytest.raises(CheckpointError, match=r"lora_A.weight \(24,\), .* \(\): expected"):
        load_peft(SPEC, PARAMS, file(flat))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern: pattern '\\(' cannot be used: a missing"),
        ({"alpha_pattern": {"(([a-z_.0-9])+)+!": 1}}, None),
        ({"alpha_pattern": {"q": "4"}}, "'q': '4'; expected a finite number"),
        ({"alpha_pattern": [1]}, r"'alpha_pattern': '\[1\]'; expected a finite number"),
        ({"lora_alpha": None}, "'lora_alpha': 'None'; expected a finite number"),
        ({"lora_alpha": float("nan")}, "'lora_alpha': 'nan'; expected a finite number"),
        ({"lora_alpha": 10**400}, "'lora_alpha': .*; expected a finite number"),
        ({"revision": "a" * 100_000}, "100,.* bytes; expected .* at most"),
    ],
)
def test_settings_of_strangers(file, settings: dict, said: str | None) -> None:
    if said is None:
        load_peft(SPEC, PARAMS, file(**settings))
    else:
        with pytest.raises(CheckpointError, match=f"1 problem\n  adapter_config.json: {said}"):
            load_peft(SPEC, PARAMS, file(**settings))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("[" * 30_000, "not valid JSON"),
        ("[]", "expected a JSON object"),
        ("{", "not valid JSON"),
        ('{"r": 1, "r": 2}', "twice"),
    ],
    ids=["nested", "list", "cut", "twice"],
)
def test_settings_that_are_no_settings(file, raw: str, said: str) -> None:
    path = file()
    (path / "adapter_config.json").write_text(raw)
    with pytest.raises(CheckpointError, match=said):
        load_peft(SPEC, PARAMS, path)


def test_large_files_are_refused_by_their_headers(file, monkeypatch) -> None:
    """No tensor is read: one of 3 GiB that has no place, one of a wrong shape, and 300,000 of them."""
    path = file()
    monkeypatch.setattr("fdel.params.files._readinto", lambda *args: pytest.fail("read"))

    def write(entries: dict[str, list[int]]) -> None:
        at, header = 0, {}
        for name, shape in entries.items():
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at := at + 4 * math.prod(shape)]}
        raw = json.dumps(header).encode()
        with (path / "adapter_model.safetensors").open("wb") as f:
            f.write(len(raw).to_bytes(8, "little") + raw)
            f.truncate(8 + len(raw) + at)

    size = 3 << 28  # elements of 3 GiB
    for entries, said in (
        ({A: [2, 12], B: [10, 2], "other": [size]}, "other has no place in the spec"),
        ({A: [size // 12, 12], B: [10, 2]}, r"expected \(67108864, 12\), \(10, 67108864\)"),
        ({A: [2, 12]}, "lora_A.weight has no place in the spec"),
        ({f"t{i}": [1] for i in range(300_000)}, "a header of .* bytes; expected .* at most"),
    ):
        write(entries)
        with pytest.raises(CheckpointError, match=said):
            load_peft(SPEC, PARAMS, path)
