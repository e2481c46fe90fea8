"""config.json: what a family does not understand is refused with the field's name, and nothing of the file is lost."""

import dataclasses
import json

import pytest

from fdel import models
from fdel.models import config, deepseek_v3, gemma3, gpt2, llama, qwen3

BASE = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=128)  # fmt: skip


def test_defaults_are_those_of_transformers():
    cfg = llama.Config.from_hf(BASE)
    assert (cfg.kv_heads, cfg.head_dim, cfg.norm_eps, cfg.tied, cfg.attn_bias) == (4, 8, 1e-6, False, False)
    assert (cfg.rope.theta, cfg.rope.kind, cfg.rope.dim) == (10000.0, "default", 8)
    assert hash(cfg) == hash(llama.Config.from_hf(BASE | {"bos_token_id": 5})), (
        "keys that fdel does not read do not count"
    )


@pytest.mark.parametrize(
    "module,change,message",
    [
        (llama, {"vocab_size": None}, r"'vocab_size': found None, expected a value of type int"),
        (llama, {"hidden_size": "32"}, r"'hidden_size': found '32', expected a value of type int"),
        (llama, {"num_hidden_layers": -1}, r"'num_hidden_layers': found -1, expected a non-negative integer"),
        (llama, {"num_hidden_layers": True}, r"'num_hidden_layers': found True"),
        (llama, {"num_key_value_heads": 3}, r"'num_key_value_heads': found 3, which does not divide 4 heads"),
        (llama, {"hidden_act": "swiglu7"}, r"'hidden_act': found 'swiglu7', understood are 'silu'"),
        (llama, {"attention_bias": "yes"}, r"'attention_bias': found 'yes'"),
        (llama, {"rope_scaling": {"type": "spiral"}}, r"'rope_type': found 'spiral'"),
        (llama, {"rope_scaling": {"type": "linear"}}, r"'rope_parameters' of type 'linear' lacks factor"),
        (qwen3, {"layer_types": ["full_attention", "sparse"]}, r"'layer_types': found .*'sparse'"),
        (qwen3, {"layer_types": ["full_attention"]}, r"'layer_types': found .*expected 2 values"),
        (gemma3, {"use_bidirectional_attention": True}, r"'use_bidirectional_attention': found True"),
        (gpt2, {"scale_attn_by_inverse_layer_idx": True}, r"'scale_attn_by_inverse_layer_idx': found True"),
        (deepseek_v3, {"hidden_act": "tanh3"}, r"'hidden_act': found 'tanh3'"),
    ],
)
def test_values_that_are_not_understood_are_refused(module, change, message):
    with pytest.raises(config.ConfigError, match=message):
        module.Config.from_hf(BASE | change)


def test_a_missing_field_is_named():
    with pytest.raises(config.ConfigError, match="'vocab_size' is missing; fdel.models.llama needs it"):
        llama.Config.from_hf({k: v for k, v in BASE.items() if k != "vocab_size"})


def test_an_unknown_model_type_names_the_nearest(tmp_path):
    with pytest.raises(config.ConfigError, match="'model_type': found 'lama', .* did you mean 'llama'"):
        models.family("lama")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 3}))
    with pytest.raises(config.ConfigError, match="'model_type': found .*absent"):
        models.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no config.json"):
        models.read_config(tmp_path / "nothing")


def test_older_spellings_of_rope_mean_the_same():
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}  # fmt: skip
    old = {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in new["rope_parameters"].items() if k != "rope_theta"}}
    assert llama.Config.from_hf(BASE | new).rope == llama.Config.from_hf(BASE | old).rope


def test_saving_keeps_keys_that_fdel_does_not_read_and_writes_those_it_does():
    cfg = llama.Config.from_hf(BASE | {"eos_token_id": [1, 2], "custom": {"a": 1}})
    d = dataclasses.replace(cfg, layers=7).to_hf()
    assert d["custom"] == {"a": 1} and d["eos_token_id"] == [1, 2] and d["num_hidden_layers"] == 7
    assert llama.Config.from_hf(d).layers == 7
