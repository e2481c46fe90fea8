"""Adapters of every family to PEFT and from it, of all that both can adapt: merged weights agree within 1e-5.

The oracle is PEFT's own merge on transformers' modules; that those compute what fdel does is checked by test_families.py.
"""

import copy
import re
import warnings

import jax
import numpy as np
import pytest
import tiny

torch = pytest.importorskip("torch", reason="the oracle is PEFT on torch (extra `test`)")
peft = pytest.importorskip("peft", reason="the oracle is PEFT (extra `test`)")

from safetensors.numpy import load_file, save_file  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402

from fdel import models, params  # noqa: E402
from fdel.models import heads, llama, whisper  # noqa: E402
from fdel.ops.weights import LowRank, is_weight  # noqa: E402
from fdel.params.hf_layout import as_modules, hf_names, layout, without_modules  # noqa: E402
from fdel.params.peft_layout import adaptable  # noqa: E402
from fdel.params.quantize import change  # noqa: E402
from fdel.params.spec import named_leaves, unstack  # noqa: E402

# Where the names of modules are not those of files, experts are fused in each of the ways, or a vector is adapted.
FIRST = (
    "llama",
    "gpt2",
    "gpt_neox",
    "mixtral",
    "phimoe",
    "kimi_linear",
    "gpt_oss",
    "llama4_text",
    "qwen3_next",
    "llava",
)
OTHERS = [n for n, e in tiny.TINY.items() if ":" not in n and not e.make and n not in FIRST]
NAMES = [*FIRST, *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)]
OUT_OF_REACH = ".mixer.out_proj", ".mamba.out_proj"  # which PEFT refuses: kernels read their weights


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    return make(tiny.TINY[request.param])


def make(entry):
    """An oracle, the spec of its family, and its weights as params."""
    oracle = tiny.build(entry)
    config = oracle.config.to_dict() | {"architectures": [entry.model]}
    family = models.of_config(config)
    spec = family.spec(family.Config.from_hf(config))
    return oracle, spec, weights(spec, oracle)


def weights(spec, oracle):
    """The arrays that modules of the oracle hold; zeros where they hold none as it is declared."""
    state = {name: x.detach().numpy() for name, x in oracle.state_dict().items()}

    def one(p):
        names = hf_names(p)
        if any(name not in state or state[name].shape != layout(p).file_shape for name in names):
            return np.zeros(p.shape, np.float32)
        return np.stack([layout(p).read(state[name]) for name in names]).reshape(p.shape)

    return jax.tree.map(one, as_modules(spec))


def merged(w):
    """What a weight with an adapter is, in float64."""
    if not isinstance(w, LowRank):
        return np.asarray(w)
    a, b, scale = (np.asarray(x, np.float64) for x in (w.a, w.b, w.scale))
    a, b = a.reshape(*a.shape[: w.batch + 1], -1), b.reshape(*b.shape[: w.batch], -1, b.shape[-1])
    return np.asarray(w.base) + (scale[..., None, None] * (b @ a)).reshape(w.shape)


def agree(got, want, adapted):
    """Compare the merged weights of all that is adapted."""
    want = dict(named_leaves(want))
    for leaf, w in named_leaves(got, is_leaf=is_weight):
        if isinstance(w, LowRank) or leaf in adapted:
            np.testing.assert_allclose(merged(w), want[leaf], atol=1e-5 * np.abs(want[leaf]).max(), err_msg=leaf)


def tied(oracle):
    head = oracle.get_output_embeddings()
    return head is not None and head.weight is oracle.get_input_embeddings().weight


def test_what_peft_has_written_is_read(case, tmp_path):
    oracle, spec, p = case
    linear = [k for k, m in oracle.named_modules() if isinstance(m, (torch.nn.Linear, Conv1D))]
    linear = [k for k in linear if not k.endswith(OUT_OF_REACH) and not k.endswith(".router")]  # PhiMoE's gives a tuple
    linear = [k for k in linear if not (tied(oracle) and oracle.get_submodule(k) is oracle.get_output_embeddings())]
    held = {k: x.ndim for k, x in oracle.named_parameters()}
    parameters = [k for k, n in held.items() if n == 3 and "expert" in k and k.endswith("_proj")]
    routers = [
        k for k, n in held.items() if n == 2 and re.search(r"\.(gate|router)\.weight$", k) and k[:-7] not in linear
    ]
    taken = [
        k for k in linear if parameters and re.search(r"\.(gate|up|down)_proj$", k)
    ]  # which PEFT takes for experts
    settings = peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=[k for k in linear if k not in taken],
        target_parameters=[*parameters, *routers, *(f"{k}.weight" for k in taken)],
        rank_pattern={r".*\.gate_up_proj": 3}, alpha_pattern={r".*\.down_proj": 5},
    )  # fmt: skip
    adapted = peft.get_peft_model(copy.deepcopy(oracle), settings).eval()
    draw(adapted)
    adapted.save_pretrained(tmp_path)
    want = weights(spec, adapted.merge_and_unload())
    moved = {k for (k, x), y in zip(named_leaves(p), jax.tree.leaves(want), strict=True) if not np.array_equal(x, y)}
    got = params.load_peft(spec, p, tmp_path)
    agree(got, want, moved)
    listed = params.load_peft(unstack(spec), unstack(p), tmp_path)
    agree(listed, unstack(want), ())


def draw(adapted):
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, x in adapted.named_parameters():
            if ".lora_" in name:
                x.copy_(torch.randn(x.shape, generator=g))


def test_peft_reads_what_is_written(case, tmp_path):
    """And so do we, with the ranks that it had."""
    oracle, spec, p = case
    rng, own = np.random.default_rng(0), {}
    leaves = {leaf: m for leaf, _, m in adaptable(as_modules(spec), p)}
    for leaf, m in leaves.items():
        batch, outputs, inputs = m.cut(dict(named_leaves(p))[leaf].shape)
        draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
        own[leaf] = (draw(*batch, 2, *inputs), draw(*batch, *outputs, 2), np.abs(draw(*batch)) + 0.5)
    lost = {leaf for leaf, q in named_leaves(spec) if hf_names(q)[0].removesuffix(".weight").endswith(OUT_OF_REACH)}
    own = {leaf: factors for leaf, factors in own.items() if leaf not in lost}
    ours = change(lambda leaf, w: LowRank(w, *own[leaf]) if leaf in own else w, p)
    task = "CAUSAL_LM" if hasattr(oracle, "prepare_inputs_for_generation") else "FEATURE_EXTRACTION"
    params.save_peft(spec, ours, tmp_path, task_type=task)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        adapted = peft.PeftModel.from_pretrained(copy.deepcopy(oracle), tmp_path).eval()
    assert not [str(w.message) for w in said if " keys while" in str(w.message)]
    names = {k for k in peft.get_peft_model_state_dict(adapted) if ".lora_" in k}
    assert names == set(load_file(tmp_path / "adapter_model.safetensors"))
    theirs = weights(spec, adapted.merge_and_unload())
    if tied(oracle) and "embed" in own:  # PEFT adds the updates of both to one array
        a, b, scale = own["embed"]
        theirs["embed"] -= scale * b @ a
    agree(ours, theirs, ())
    back = params.load_peft(spec, p, tmp_path)
    agree(back, jax.tree.map(merged, ours, is_leaf=is_weight), own)
    assert {w.a.shape[w.batch] for w in jax.tree.leaves(back, is_leaf=is_weight) if isinstance(w, LowRank)} == {2}


def test_embeddings_that_are_the_head_too(tmp_path):
    """PEFT's pairs of adapters compute what ours do, both ways, in 1e-5 of the largest logit; others are refused."""
    entry = tiny.TINY["llama"]
    oracle, spec, p = make(entry._replace(values=entry.values | {"tie_word_embeddings": True}))
    cfg, tokens = llama.Config.from_hf(oracle.config.to_dict()), np.random.default_rng(0).integers(3, 100, (1, 7))
    forward = jax.jit(lambda p: llama.forward(p, tokens, cfg)[0])
    for name, targets in ("both", ["embed_tokens"]), ("embedding", ["embed_tokens"]), ("head", ["lm_head"]):
        settings = peft.LoraConfig(r=2, target_modules=targets, ensure_weight_tying=name == "both")
        adapted = peft.get_peft_model(copy.deepcopy(oracle), settings).eval()
        draw(adapted)
        adapted.save_pretrained(tmp_path / name)
        if name != "both":
            with pytest.raises(params.CheckpointError, match="one array here, so both need the same adapter"):
                params.load_peft(spec, p, tmp_path / name)
            continue
        want = adapted(torch.tensor(tokens)).logits.detach().numpy()
        ours = params.load_peft(spec, p, tmp_path / name)
        np.testing.assert_allclose(forward(ours), want, atol=1e-5 * np.abs(want).max())
        params.save_peft(spec, ours, tmp_path / "written")
        again = peft.PeftModel.from_pretrained(copy.deepcopy(oracle), tmp_path / "written").eval()
        np.testing.assert_allclose(again(torch.tensor(tokens)).logits.detach(), want, atol=1e-5 * np.abs(want).max())
    tensors = load_file(tmp_path / "both" / "adapter_model.safetensors")
    head = "base_model.model.lm_head.lora_A.weight"
    save_file(tensors | {head: tensors[head] + 1}, tmp_path / "both" / "adapter_model.safetensors")
    with pytest.raises(params.CheckpointError, match="one array here"):
        params.load_peft(spec, p, tmp_path / "both")


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "roberta"])
def test_embeddings_of_models_without_a_head(name, tmp_path):
    """PEFT's adapter of the embedding alone is read, and what is written has none of a head."""
    oracle = tiny.build(tiny.TINY[name])
    family = models.of_config(oracle.config.to_dict() | {"architectures": [tiny.TINY[name].model]})
    spec, base = heads.spec(family, family.Config.from_hf(oracle.config.to_dict()), "base"), oracle.base_model
    p = weights(spec, base)
    table = next(k for k, m in base.named_modules() if m is base.get_input_embeddings())
    settings = peft.LoraConfig(r=2, target_modules=[table], task_type="FEATURE_EXTRACTION")
    adapted = peft.get_peft_model(base, settings)
    draw(adapted)
    adapted.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    ours = params.load_peft(spec, p, tmp_path / "theirs")
    agree(ours, weights(spec, adapted.merge_and_unload()), {"embed"})
    params.save_peft(spec, ours, tmp_path / "ours", task_type="FEATURE_EXTRACTION")
    theirs, written = (load_file(tmp_path / x / "adapter_model.safetensors") for x in ("theirs", "ours"))
    assert set(written) == set(theirs)


@pytest.mark.parametrize(
    ("name", "kind", "head"),
    [("qwen3", "value", "lm_head"), ("rwkv:wide", None, "head"), ("whisper", None, "proj_out")],
)
def test_heads_that_are_the_embedding_are_found(name, kind, head, tmp_path):
    """Beside a value head too, and where transformers calls the head otherwise; what is written is read again."""
    if name == "whisper":
        family, cfg = whisper, whisper.Config(vocab=50, embed=16, ffn=32, encoder_ffn=32, heads=2, encoder_heads=2)
    else:
        d = tiny.build(tiny.TINY[name]).config.to_dict() | {"architectures": [tiny.TINY[name].model]}
        family = models.of_config(d)
        cfg = family.Config.from_hf(d)
    spec = heads.spec(family, cfg, kind)
    p = params.init(spec, jax.random.key(0))
    ours = params.lora.add(p, 2, 3.0, r"(^|\.)embed$", key=jax.random.key(1), spec=spec)
    params.save_peft(spec, ours, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert {k for k in tensors if "embedding" not in k} == {f"base_model.model.{head}.lora_{x}.weight" for x in "AB"}
    jax.tree.map(np.testing.assert_array_equal, params.load_peft(spec, p, tmp_path), ours)


@pytest.mark.parametrize("name", ["mixtral", "llava"])
def test_names_of_older_versions_are_read(name, tmp_path):
    """Experts one by one, as in files of the checkpoint, and towers below `vision_model`."""
    _, spec, p = make(tiny.TINY[name])
    p = params.lora.add(p, 2, 3.0, r"layers\..*(q|gate|down)$", key=jax.random.key(0), spec=spec)
    params.save_peft(without_modules(spec), p, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    older = {k.replace(".vision_tower.", ".vision_tower.vision_model."): x for k, x in tensors.items()}
    part = {"mixtral": "block_sparse_moe.experts.1.w1.lora_A", "llava": "vision_tower.vision_model.encoder"}[name]
    assert any(part in k for k in older)
    save_file(older, tmp_path / "adapter_model.safetensors")
    back = params.load_peft(spec, params.lora.unload(p), tmp_path)
    jax.tree.map(np.testing.assert_array_equal, back, p)
