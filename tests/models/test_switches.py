"""Every switch of a config.json that transformers' model reads: read here too, refused by name, or known to change nothing.

The sources of transformers say which keys its models read. `make matrix` also turns one switch of each family after the
other and compares logits: what no entry of `tiny` has is right or refused, too.
"""

import importlib
import inspect
import json
import re
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import suite
import tiny

from fdel import models
from fdel.models import keys as K
from fdel.models.keys import ConfigError

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch (extra `test`)")
transformers = pytest.importorskip("transformers")

OF_TEXT = {name: e for name, e in tiny.TINY.items() if "text_config" not in e.values}  # others have a text of a family
NAMES = [name for name, e in OF_TEXT.items() if ":" not in name and not e.make]
# Of `K.NEUTRAL`: what transformers' models read for losses, caches and answers' forms, a row whose gradient is zero,
# weights' beginnings, a way to compute the same in parts.
SEEN = set(
    "pad_token_id use_cache return_dict output_attentions output_hidden_states output_router_logits dtype is_decoder "
    "router_aux_loss_coef problem_type initializer_range rescale_prenorm_residual chunk_size_feed_forward "
    "is_encoder_decoder num_labels torch_dtype".split()
)
# What has no effect beside the other values of an entry: windows of layers that are listed as without, sizes given anew.
BESIDE = dict.fromkeys(["qwen2", "qwen2_moe", "qwen3", "qwen3_moe"], "sliding_window")
BESIDE |= {"falcon_h1": "mamba_expand", "exaone4": "sliding_window_pattern"}
BESIDE |= {"smollm3": "sliding_window use_sliding_window"}


def others(key: str, value: object) -> list:
    """Values that a key may have in place of its own, of the same type where it has one."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value * 2, value + 1, value // 2 if value > 1 else 3]
        case float():
            return [value * 1.5 + 0.01, value / 2]
        case str():
            return ["gelu", "relu", "zzz"] if "act" in key else ["zzz"]
        case None:
            return [True, 4, 0.5, "zzz"]
    return [[1, 2]] if isinstance(value, list) else [{"a": 1}]


def whole(name: str) -> dict:
    """All keys of an entry's config.json, those at their default too."""
    entry = tiny.TINY[name]
    return json.loads(getattr(transformers, entry.config)(**entry.values).to_json_string(use_diff=False))


def read_by_transformers(name: str) -> set[str]:
    """Name the keys that the source of a transformers model asks its config for."""
    module = getattr(transformers, tiny.TINY[name].model).__module__
    source = inspect.getsource(importlib.import_module(module))
    return set(re.findall(r"config\.(\w+)", source)) | set(re.findall(r'config, "(\w+)"', source))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_switch_is_dropped(name):
    d, family = whole(name), models.family(name)
    cfg, theirs = family.Config.from_hf(d), read_by_transformers(name)
    assert len(theirs & d.keys()) > 5  # the source was found
    any_value = {k for k, v in getattr(family.Config, "ONLY", {}).items() if v is K.ANY}

    def dropped(key: str, value: object) -> bool:
        try:
            return family.Config.from_hf(d | {key: value}) == cfg
        except ConfigError:
            return False

    said = {k: v for k, v in d.items() if k in theirs and k not in ("model_type", "architectures")}
    silent = {k for k, v in said.items() if all(dropped(k, x) for x in others(k, v))}
    silent -= {k for k in silent if K.is_dropout(k) or k.startswith("summary_")} | any_value | SEEN
    assert silent == set(BESIDE.get(name, "").split()) & silent


ODD = {("falcon", "alibi")}  # transformers' eager attention drops it; falcon:alibi compares with another


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_each_switch_alone_gives_transformers_logits_or_is_refused(name, tmp_path):
    """All that is no whole number, one at a time; 1e-4 of the largest logit. What transformers cannot run is left out."""
    entry, count = tiny.TINY[name], 0
    cls, tokens = getattr(transformers, entry.config), np.random.default_rng(0).integers(3, 110, (2, suite.LENGTH))
    skipped = lambda k: k in K.NEUTRAL or K.is_dropout(k) or (name, k) in ODD
    keys = whole(name)
    inside = [
        ((part, k), v) for part in ("attn_config", "ffn_config") for k, v in keys.get(part, {}).items()
    ]  # of dbrx
    for (*parts, key), value in [*(((k,), v) for k, v in keys.items()), *inside]:
        turned = others(key, value) if isinstance(value, bool | float | str | None) and not skipped(key) else []
        for i, other in enumerate(turned):
            values, directory = json.loads(json.dumps(entry.values)), tmp_path / f"{key}{i}"
            reduce(lambda d, part: d.setdefault(part, {}), parts, values)[key] = other
            try:
                make = getattr(transformers, entry.model)._from_config
                oracle = make(cls(**values), attn_implementation=entry.attn, dtype=torch.float32).eval()
                tiny.randomise(oracle, 0, entry.keep)
                with torch.no_grad():
                    want = oracle(torch.tensor(tokens)).logits.numpy()
                oracle.save_pretrained(directory)
            except Exception:
                continue
            try:
                model = models.load(directory, dtype=jnp.float32)
            except ConfigError as e:
                assert any(f"{c}{key}'" in str(e) for c in "'.") or key.endswith(("num_experts", "top_k_experts")), (
                    key,
                    other,
                    str(e),
                )
                continue
            run = jax.jit(partial(model.family.forward, cfg=model.cfg))
            assert suite.error(run(model.params, tokens)[0], want) < 1e-4, (key, value, other)
            count += 1
    assert count


@pytest.mark.parametrize("every", [1, 3])
def test_layers_are_rescaled_as_in_evaluation(every, tmp_path):
    """RWKV's rescale_every weighs in the epsilon of the norms: 7e-4 of the largest logit at 1 for streams near 1."""
    values = tiny.TINY["rwkv"].values | dict(rescale_every=every, num_hidden_layers=4)
    oracle = tiny.checkpoint(tiny.TINY["rwkv"]._replace(values=values), tmp_path)
    tokens = np.random.default_rng(0).integers(3, 110, (2, 12))
    with torch.no_grad():
        want = oracle.eval()(torch.tensor(tokens)).logits.numpy()
    assert oracle.rwkv.layers_are_rescaled
    assert suite.error(suite.full(models.load(tmp_path, dtype=jnp.float32), tokens), want) < 2e-6
