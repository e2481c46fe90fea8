"""config.json: what a family does not understand is refused with the field's name, and nothing of the file is lost."""

import dataclasses
import json
import math

import published
import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fdel import models, ops, params
from fdel.models import config, deepseek_v3, gemma3_text, gpt2, kimi_linear, llama, mixtral, qwen3

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
        (
            llama,
            {"num_hidden_layers": -1},
            r"'num_hidden_layers': found -1, expected a positive integer of at most 4096",
        ),
        (llama, {"num_hidden_layers": True}, r"'num_hidden_layers': found True"),
        (llama, {"num_key_value_heads": 3}, r"found kv_heads = 3, which does not divide heads = 4"),
        (llama, {"hidden_act": "swiglu7"}, r"'hidden_act': found 'swiglu7', understood are 'silu'"),
        (llama, {"attention_bias": "yes"}, r"'attention_bias': found 'yes'"),
        (llama, {"rope_scaling": {"type": "spiral"}}, r"'rope_type': found 'spiral'"),
        (llama, {"rope_scaling": {"type": "linear"}}, r"'rope_parameters' of type 'linear' lacks factor"),
        (qwen3, {"layer_types": ["full_attention", "sparse"]}, r"'layer_types': found .*'sparse'"),
        (qwen3, {"layer_types": ["full_attention"]}, r"'layer_types': found .*expected 2 values"),
        (gemma3_text, {"use_bidirectional_attention": True}, r"'use_bidirectional_attention': found True"),
        (gpt2, {"scale_attn_by_inverse_layer_idx": True}, r"'scale_attn_by_inverse_layer_idx': found True"),
        (deepseek_v3, {"hidden_act": "tanh3"}, r"'hidden_act': found 'tanh3'"),
        (deepseek_v3, {"topk_group": 1, "n_routed_experts": 16}, r"found 8 of 16 experts in 1 of 8 groups"),
        (kimi_linear, {"tie_word_embeddings": True}, r"'tie_word_embeddings': found True, only False"),
    ],
)
def test_values_that_are_not_understood_are_refused(module, change, message):
    with pytest.raises(config.ConfigError, match=message):
        module.Config.from_hf(BASE | change)


def test_a_missing_field_is_named():
    with pytest.raises(config.ConfigError, match="'vocab_size' is missing; fdel.models.llama needs it"):
        llama.Config.from_hf({k: v for k, v in BASE.items() if k != "vocab_size"})


def test_an_unknown_model_type_names_all_and_takes_none_for_another(tmp_path):
    with pytest.raises(
        config.ConfigError, match="'model_type': found 'lama', not a family of this version; it has .*llama"
    ):
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
    labels = {"0": "no", "1": "yes"}
    cfg = llama.Config.from_hf(BASE | {"eos_token_id": [1, 2], "id2label": labels, "quantization_config": {"bits": 4}})
    d = dataclasses.replace(cfg, layers=7).to_hf()
    assert "quantization_config" not in d, "what is saved is not quantized any more"
    assert d["id2label"] == labels and d["eos_token_id"] == [1, 2] and d["num_hidden_layers"] == 7
    assert llama.Config.from_hf(d).layers == 7


# ---- keys that nothing reads ---------------------------------------------------------------------------------------

CLASSES = {name: e.config for name, e in tiny.TINY.items() if ":" not in name and not e.make}
# Without those whose defaults transformers cannot run either: three components of other sizes than a head's rotation.
WITH_DEFAULTS = [name for name in CLASSES if name not in ("glm4v", "glm4v_moe", "glm46v")]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
DEEPSEEK_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                 "original_max_position_embeddings": 4096, "type": "yarn"}  # fmt: skip
GEMMA_27B = {"hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text", "num_attention_heads": 32,
             "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168, "head_dim": 128,
             "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
QWEN = {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 1e6, "sliding_window": None, "torch_dtype": "bfloat16", "use_cache": True,
        "transformers_version": "4.51.0", "use_sliding_window": False, "vocab_size": 151936}  # fmt: skip
# What the Hub's files say, as far as it differs from transformers' defaults; spellings of transformers 4.
PUBLISHED = {
    "Llama-2-7b": {"model_type": "llama", "_name_or_path": "x", "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
        "max_length": 4096, "pretraining_tp": 1, "rope_scaling": None, "tie_word_embeddings": False},
    "Llama-3.1-8B": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "mlp_bias": False, "rope_theta": 5e5,
        "rope_scaling": LLAMA3, "eos_token_id": [128001, 128008, 128009], "max_position_embeddings": 131072},
    "Qwen3-8B": QWEN | {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 36,
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8},
    "Qwen3-30B-A3B": QWEN | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "hidden_size": 2048, "num_experts": 128,
        "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "output_router_logits": False, "router_aux_loss_coef": 0.001, "intermediate_size": 6144},
    "Qwen3-Next-80B-A3B": QWEN | {"model_type": "qwen3_next", "full_attention_interval": 4, "head_dim": 256,
        "partial_rotary_factor": 0.25, "rope_theta": 1e7, "num_attention_heads": 16, "num_key_value_heads": 2,
        "linear_conv_kernel_dim": 4, "num_experts": 512, "shared_expert_intermediate_size": 512, "sliding_window": 4096},
    "Mixtral-8x7B": {"model_type": "mixtral", "hidden_size": 4096, "num_local_experts": 8, "num_experts_per_tok": 2,
        "output_router_logits": False, "router_aux_loss_coef": 0.02, "sliding_window": None, "rope_theta": 1e6},
    "DeepSeek-V3": {"model_type": "deepseek_v3", "auto_map": {"AutoConfig": "x"}, "aux_loss_alpha": 0.001, "ep_size": 1,
        "moe_layer_freq": 1, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "rope_scaling": DEEPSEEK_YARN,
        "scoring_func": "sigmoid", "seq_aux": True, "topk_method": "noaux_tc", "rope_theta": 10000, "pretraining_tp": 1,
        "quantization_config": {"quant_method": "fp8"}, "max_position_embeddings": 163840},
    "Codestral-Mamba": {"model_type": "mamba2", "norm_before_gate": True, "rms_norm": True, "time_step_limit": [0.0, None],
        "rescale_prenorm_residual": False, "time_step_rank": 256} | {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
    "gpt2": {"model_type": "gpt2", "n_ctx": 1024, "resid_pdrop": 0.1, "summary_type": "cls_index", "attn_pdrop": 0.1,
        "task_specific_params": {"text-generation": {"do_sample": True}}, "activation_function": "gelu_new"},
    "gemma-3-1b": {"model_type": "gemma3_text", "attn_logit_softcapping": None, "cache_implementation": "hybrid",
        "final_logit_softcapping": None, "hidden_size": 1152, "num_attention_heads": 4, "num_key_value_heads": 1,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "num_hidden_layers": 26},
    "gemma-3-27b": {"model_type": "gemma3", "boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106],
        "image_token_index": 262144, "mm_tokens_per_image": 256, "text_config": GEMMA_27B, "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "patch_size": 14,
            "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
            "vision_use_head": False}},
}  # fmt: skip
PUBLISHED |= published.EXPERTS | published.DENSE | published.GPTS


def of_transformers(family, **options):
    import transformers

    return json.loads(getattr(transformers, CLASSES[family])().to_json_string(**options))


def read(directory, d):
    (directory / "config.json").write_text(json.dumps(d) if not isinstance(d, bytes) else d.decode())
    return models.read_config(directory)


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_of_the_hub_load(tmp_path, name):
    module, cfg = read(tmp_path, PUBLISHED[name])
    assert module is models.family(PUBLISHED[name]["model_type"])
    assert module.Config.from_hf(models.config_dict(module, cfg)) == cfg


def test_transformers_defaults_load_and_change_nothing():
    for name in WITH_DEFAULTS:
        module = models.family(name)
        whole = module.Config.from_hf(of_transformers(name, use_diff=False))
        assert whole == module.Config.from_hf(of_transformers(name))
    assert models.dropouts(gpt2.Config.from_hf(of_transformers("gpt2"))) == dict.fromkeys(
        ("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"), 0.1
    )


def test_defaults_hold_for_a_config_made_in_python_too():
    made = mixtral.Config(head_dim=128, rope=ops.Rope(128, 1e6, original=131072))
    assert made == mixtral.Config.from_hf({}) and made.norm_eps == 1e-5 and made.vocab == 32000


MEANT = {"alibi": True, "residual_multiplier": 0.22, "attn_logit_softcapping": 50.0, "logits_scaling": 8.0, "mup": {"a": 1},
         "use_rope": False, "parallel_attn": True, "clip_qkv": 8.0, "no_rope_layers": [0, 1], "attention_chunk_size": 8,
         "use_bidirectional_attention": True, "embedding_scale": "sqrt", "is_causal": False}  # fmt: skip
SAYS_NO = {"alibi": False, "residual_multiplier": 1.0, "attn_logit_softcapping": None, "logits_scaling": 1, "mup": {},
           "use_rope": True, "parallel_attn": False, "clip_qkv": None, "no_rope_layers": [], "attention_chunk_size": 0,
           "hidden_dropout": 0.3, "layerdrop_dropout": 0.1, "id2label": {"0": "a"}}  # fmt: skip


@pytest.mark.parametrize("name", WITH_DEFAULTS)
def test_a_key_that_nothing_reads_is_refused_unless_it_says_no(name):
    d, module, own = of_transformers(name), models.family(name), of_transformers(name, use_diff=False)
    says_no, meant = ({k: v for k, v in keys.items() if k not in own} for keys in (SAYS_NO, MEANT))
    assert module.Config.from_hf(d | says_no) == module.Config.from_hf(d)
    for key, value in meant.items():
        with pytest.raises(config.ConfigError, match=f"'{key}': found .*fdel.models.{name} does not read"):
            module.Config.from_hf(d | {key: value})
    with pytest.raises(config.ConfigError, match="'vocab_sizes': found 7 .did you mean 'vocab_size'"):
        if "text_config" in d:  # of a family that sees
            module.Config.from_hf(d | {"text_config": d["text_config"] | {"vocab_sizes": 7}})
        module.Config.from_hf(d | {"vocab_sizes": 7})


def test_keys_around_and_inside_a_text_config_are_named():
    d = PUBLISHED["gemma-3-27b"]
    assert gemma3_text.Config.from_hf(d) == gemma3_text.Config.from_hf(GEMMA_27B)
    assert json.loads(gemma3_text.Config.from_hf(d).source)["eos_token_id"] == [1, 106]
    assert not gemma3_text.Config.from_hf(d | {"tie_word_embeddings": False}).tied
    for change, message in (
        ({"text_config": GEMMA_27B | {"alibi": True}}, "text_config: config field 'alibi': found True"),
        ({"text_config": GEMMA_27B | {"hidden_size": "5376"}}, "text_config: config field 'hidden_size': found '5376'"),
        ({"audio_window": 3}, "'audio_window': found 3"),
        ({"text_config": [1]}, r"'text_config': found \[1\]"),
        ({"text_config": None}, "'num_hidden_layers'|'boi_token_index': found 255999"),
    ):
        with pytest.raises(config.ConfigError, match=message):
            gemma3_text.Config.from_hf(d | change)


# ---- hostile files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text,message",
    [
        (b"[]", r"config.json: found \[\], expected an object"),
        (b"null", "found None, expected an object"),
        (b"{", "is not JSON"),
        (b'{"a":' * 100_000, "is not JSON"),
        (b'{"model_type": ["llama"]}', r"'model_type': found \['llama'\], expected a string"),
        (b'{"model_type": {"llama": 1}}', "'model_type': found"),
        (b'{"model_type": null}', "'model_type': found None"),
        (b'{"model_type": "' + b"x" * 10**6 + b'"}', "'model_type': found 'x"),
        (b'{"model_type": "llama", "vocab_size": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b'{"model_type": "llama", "vocab_size": 99999999999999999999}', "'vocab_size': found 99.*at most 2147483647"),
        (b'{"model_type": "llama", "architectures": "x"}', "'vocab_size' is missing"),
        (b" " * (16 * 2**20 + 1), "found 16777217 bytes, expected at most 16777216"),
    ],
)
def test_a_config_that_is_none_names_its_file(tmp_path, text, message):
    with pytest.raises(config.ConfigError, match=message) as e:
        read(tmp_path, text)
    assert str(e.value).startswith(str(tmp_path / "config.json")) and len(str(e.value)) < 1000


def test_absurd_sizes_are_refused_before_a_spec_is_built():
    for key, most in (("num_hidden_layers", 4096), ("vocab_size", 2**31 - 1)):
        with pytest.raises(config.ConfigError, match=rf"{key!r}: found 1000000+, .* at most {most}"):
            llama.Config.from_hf(BASE | {key: 10**6 if most == 4096 else 10**10})


SOUND = {name: tiny.TINY[name].values for name in CLASSES}
HOSTILE = [None, True, False, "", "x", "12", -1, 0, 1, 3, 7.5, -0.1, 1e9, 10**6, 2**63, 10**400, math.nan, math.inf, [],
           [1], ["x"] * 3, [[[[]]]], {}, {"a": {"b": {}}}, {"rope_type": "yarn"}, {"rope_type": "linear", "factor": "8"},
           {"type": ["su"]}, {"rope_theta": -1}, {"full_attention": 3},
           {"rope_type": "longrope", "long_factor": 1}]  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
@given(data=st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_value_of_any_key_is_understood_or_refused(name, data):
    """What loads has a spec; what does not is a ConfigError, whatever stands in one to three places of a sound file."""
    base, module = dict(SOUND[name]), models.family(name)
    keys = sorted(
        {*base, *MEANT, "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings", "layer_types"}
    )
    for _ in range(data.draw(st.integers(1, 3))):
        base[data.draw(st.sampled_from(keys))] = data.draw(st.sampled_from(HOSTILE))
    try:
        cfg = module.Config.from_hf(base)
    except config.ConfigError as e:
        assert len(str(e)) < 3000
        return
    assert params.count(module.spec(cfg)) > 0
    module.state_spec(cfg, pages=2, rows=1)


def test_a_model_is_printed_for_reading():
    """Its weights as dtypes and shapes: no number of them, and none is waited for."""
    cfg = llama.Config.from_hf(BASE)
    shown = repr(models.Model(llama, cfg, params.abstract(llama.spec(cfg), "bfloat16")))
    assert shown.startswith("Model(fdel.models.llama, Config(vocab=64") and "'up': bf16[2,48,32]" in shown
