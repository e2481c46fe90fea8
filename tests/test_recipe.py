"""Run files: what parses and what it means, what is refused and why, and that every key has a reader."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from jax.experimental import checkify

from fdel import cli, models, ops, options, params, recipe, serve, text
from fdel.models import llama, mixtral
from fdel.recipe import build, config, methods, names, read, schema, serving, trainer
from fdel.recipe.data import evaluation_settings
from fdel.serve.server import launch
from fdel.train import data, losses

ROOT = Path(__file__).parents[1]
GUIDE = list(yaml.safe_load_all((ROOT / "tests" / "fixtures" / "guide.yaml").read_text()))
SFT, DPO, EVAL, SERVE, QLORA, DISTILL = GUIDE[11:17]
CFG = llama.Config(vocab=300, embed=32, ffn=48, layers=1, heads=4, kv_heads=2, head_dim=8, rope=ops.Rope(8, 1e4))


KEPT = ("model", "trainer", "mixture.informs[]", "actions[].serve")  # some of the sections that `--keys` shows


def weights():
    return jax.jit(lambda key: params.init(llama.spec(CFG), key, dtype=jnp.float32))(jax.random.key(0))


def made(**sections) -> recipe.Recipe:
    """A recipe that is valid but for what the sections change."""
    base = {"model": {"name_or_path": "m"}, "mixture": {"informs": [{"data_files": "d.jsonl"}]}, "actions": ["train"]}
    return recipe.from_dict({**base, **sections})


def holds(shown, given, path="") -> bool:
    """Whether all that is given is shown, with the same values, and by fdel's names."""
    if isinstance(given, dict):
        ours = {names.synonym(path, k) or k: v for k, v in given.items()}
        return all(k in shown and holds(shown[k], v, f"{path}.{k}") for k, v in ours.items())
    if isinstance(given, list):
        return len(shown) == len(given) and all(map(holds, shown, given))
    return shown == given


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    models.save(models.Model(llama, CFG, weights()), path)
    text.save(text.train_bpe(["hello world"], 300), path)
    return path


# ---- the guide -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", GUIDE, ids=lambda d: "+".join(d))
def test_every_example_of_the_guide_parses_and_survives_a_round_trip(document, tmp_path):
    found = recipe.from_dict(document)
    for write, load, name in ((found.to_yaml, recipe.from_yaml, "r.yaml"), (found.to_json, recipe.from_json, "r.json")):
        write(tmp_path / name)
        assert load(tmp_path / name) == found
    shown = recipe.to_dict(found, defaults=True)
    assert all(holds(shown[section], values, section) for section, values in document.items() if section != "actions")
    wrapped = {"elm": {k: v for k, v in document.items() if k != "actions"}, "actions": document.get("actions")}
    assert recipe.from_dict(wrapped) == found


def test_the_guides_sft_means_what_it_says():
    found = recipe.from_dict(SFT)
    assert recipe.faults(found) == []
    assert [a.name for a in found.actions] == ["validate", "train"]
    settings = recipe.build_settings(found)
    assert settings == data.Settings(batch=32, length=2048, packing="best_fit", epochs=3, seed=42)
    (source,) = recipe.build_sources(found, found.mixture.informs)
    assert (source.files, source.format) == (("train/*.json",), "json")
    rate = recipe.build_schedule(found, 1100)
    assert np.allclose([rate(s) for s in (0, 50, 100, 600, 1100)], [0, 1e-5, 2e-5, 1e-5, 0])
    assert found.trainer.gradient_accumulation_steps == 4 and found.trainer.save_steps == 500


def test_the_guides_dpo_means_what_it_says():
    found = recipe.from_dict(DPO)
    assert recipe.faults(found) == []
    assert recipe.build_settings(found) == data.Settings(kind="pairs", batch=16, length=1024, epochs=1, seed=42)
    (source,) = recipe.build_sources(found, found.mixture.informs)
    row = {"prompt": "p", "chosen": "c", "rejected": "r", "other": 1}
    assert source.transform(row) == {"prompt": "p", "chosen": "c", "rejected": "r"}
    with pytest.raises(ValueError, match="no column 'rejected'"):
        source.transform({"prompt": "p", "chosen": "c"})
    assert found.trainer.beta == 0.1 and found.reference_model.name_or_path == "./my-sft-model"


def test_the_guides_qlora_trains_adapters_on_nf4():
    found = recipe.from_dict(QLORA)
    assert recipe.faults(found) == [] and recipe.settle(found).lora and recipe.settle(found).format == "nf4"
    assert found.quantization.model.group_size == 64 and found.trainer.learning_rate == 2e-4
    assert not recipe.settle(found.set("quantization.apply_quantization", False)).lora


def test_the_guides_distillation_takes_the_mixtures_batch():
    found = recipe.from_dict(DISTILL)
    assert recipe.faults(found) == [] and recipe.settle(found).rows == 16
    assert "teacher_model: missing" in recipe.faults(found.set("teacher_model", None))[0]


def test_the_guides_evaluation_means_what_it_says():
    found = recipe.from_dict(EVAL)
    assert recipe.faults(found) == []
    (action,) = [a.settings for a in found.actions if a.name == "eval"]
    o = serving.evaluation_options(found, action)
    assert o.tasks == ("hellaswag", "winogrande", "arc_easy", "arc_challenge") and o.num_fewshot == 0
    assert (o.max_new_tokens, o.temperature, o.top_p, o.batch, o.limit) == (512, 0.0, None, 32, None)
    assert (action.output_path, action.print_results, o.apply_chat_template) == ("./eval_results.json", True, False)
    s = serving.settings(found)
    assert (s.rows, s.max_length, s.cache) == (64, 4096, None)
    whole = serving.evaluation_options(recipe.from_dict({**EVAL, **GUIDE[10]}), action)
    assert whole.cache_requests and whole.apply_chat_template and whole.progress and whole.top_p == 0.95
    assert (whole.system_instruction, whole.max_new_tokens) == ("You are a helpful assistant.", 2048)
    assert not serving.evaluation_options(found.set("esurge.silent_mode", True), action).progress


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("eval.batch_size", 0, "found 0, expected 1 or more"), ("eval.top_p", 1.5, "found 1.5, expected 1e-09 to 1"),
        ("eval.temperature", -0.1, "expected 0 to 100"), ("eval.limit", 0, "expected a positive number"),
        ("eval.max_new_tokens", 0, "expected 1 or more"), ("model", None, "model.name_or_path: missing"),
    ],
)  # fmt: skip
def test_evaluations_that_cannot_be_are_refused(path, value, message):
    assert [message in f for f in recipe.faults(recipe.from_dict(EVAL).set(path, value))] == [True]


def test_evaluation_needs_tasks():
    found = recipe.from_dict({**EVAL, "actions": [{"eval": {"num_fewshot": -1}}]})
    assert recipe.faults(found) == [
        "actions[0].eval.tasks: missing; name some, such as [hellaswag]",
        "actions[0].eval.num_fewshot: found -1, expected 0 or more",
    ]


@pytest.mark.slow
def test_the_eval_action_scores_the_model(checkpoint, tmp_path, capsys):
    """The perplexity of a text is that of a full forward; unknown tasks and old results are found before training."""
    pytest.importorskip("lm_eval", reason="the extra eval")
    said = "hello world hello"
    (tmp_path / "rows.json").write_text(json.dumps([{"t": said}, {"t": "unread"}]))
    task = {
        "task": "said", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.json")}},
        "test_split": "test", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{t}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    }  # fmt: skip
    (tmp_path / "said.yaml").write_text(json.dumps(task))
    action = {"tasks": ["said"], "include_path": str(tmp_path), "output_path": str(tmp_path / "out" / "scores.json")}
    document = {
        "model": {"name_or_path": str(checkpoint)}, "sharding": {"axis_dims": [1] * 5}, "eval": {"limit": 1},
        "esurge": {"max_num_seqs": 2, "silent_mode": True, "max_model_len": 64}, "actions": [{"eval": action}],
    }  # fmt: skip
    recipe.run(recipe.from_dict(document))
    ids = [0, *text.encode(text.load(checkpoint), said)]
    logits, _ = llama.forward(models.load(checkpoint).params, jnp.array([ids[:-1]]), models.load(checkpoint).cfg)
    total = jnp.take_along_axis(jax.nn.log_softmax(logits[0]), jnp.array(ids[1:])[:, None], 1).sum()
    found = json.loads((tmp_path / "out" / "scores.json").read_text())["results"]["said"]
    np.testing.assert_allclose(found["byte_perplexity,none"], np.exp(-total / len(said)), rtol=1e-5)
    assert "byte_perplexity" in capsys.readouterr().out
    train = {"trainer": {"save_directory": str(tmp_path / "run")}, "mixture": {"informs": [{"data_files": "no.jsonl"}]}}
    for wrong, message in [
        ({}, "nothing is overwritten"),
        ({"output_path": None, "include_path": "no"}, "is no directory"),
    ]:
        again = {**document, **train, "actions": ["train", {"eval": action | wrong}]}
        with pytest.raises((OSError, ValueError), match=message):
            recipe.run(recipe.from_dict(again))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("document", [EVAL, SERVE])
def test_settings_of_actions_are_typed(document):
    wrong = json.loads(
        json.dumps(document).replace("8000", '"many"').replace('"num_fewshot": 0', '"num_fewshot": "no"')
    )
    with pytest.raises(recipe.RecipeError, match="expected a whole number"):
        recipe.from_dict(wrong)


def test_the_guides_server_means_what_it_says():
    """Open to the world and without keys, because the guide says so in so many words; not by leaving a key out."""
    found = recipe.from_dict(SERVE)
    assert recipe.faults(found) == []
    (action,) = [a.settings for a in found.actions if a.name == "serve"]
    o = serving.options(found, action)
    assert (o.host, o.port, o.tool_parser, o.insecure, o.key_file, o.memory) == (
        "0.0.0.0",
        8000,
        "hermes",
        True,
        None,
        0.85,
    )
    assert (o.settings.rows, o.settings.max_length, o.settings.cache) == (256, 4096, None)
    launch.check(o)
    with pytest.raises(ValueError, match="--api-key-file"):
        launch.check(serving.options(found, dataclasses.replace(action, require_api_key=None)))
    assert "api_key_file: missing" in serving.faults(found, dataclasses.replace(action, require_api_key=True))[0]
    small = found.set("quantization.kv_cache.quantization_method", "8bit")
    assert serving.faults(small, action) == [] and serving.options(small, action).settings.kv_cache_dtype == "int8"
    assert o.settings.kv_cache_dtype is None and "nf4 is for weights" in "".join(
        serving.faults(found.set("quantization.kv_cache.quantization_method", "nf4"), action)
    )
    assert "group_size" in serving.faults(found.set("quantization.kv_cache.group_size", 128), action)[0]


def test_the_guides_context_handling_means_what_it_says():
    example = next(d["esurge"] for d in GUIDE if list(d) == ["esurge"])
    guide = made(actions=["serve"], esurge={**example, "page_size": 64})
    how = lambda r: serving.options(r, schema.ServeAction()).truncate
    assert how(guide) == "left" and serving.faults(guide, schema.ServeAction()) == recipe.faults(guide) == []
    assert how(guide.set("esurge.truncate_mode", "middle")) == "middle"
    assert how(guide.set("esurge.auto_truncate_prompt", False).set("esurge.truncate_mode", None)) is None is how(made())
    for key, value, message in (("strict_context", True, "strict_context: refuses the prompts"),):
        assert message in serving.faults(guide.set(f"esurge.{key}", value), schema.ServeAction())[0]


@pytest.mark.slow
def test_a_recipe_serves_what_it_names(checkpoint, monkeypatch):
    served = []
    monkeypatch.setattr(launch, "listen", lambda found, options, keys: served.append((found, options)))
    asked = {"model": {"name_or_path": str(checkpoint)}, "esurge": {"max_num_seqs": 4, "max_model_len": 32},
             "quantization": {"model": {"quantization_method": "8bit"}}, "actions": [{"serve": {"port": 1}}]}  # fmt: skip
    recipe.run(recipe.from_dict(asked))
    ((found,), options) = served[0]
    assert (found.name, options.port, found.engine.settings.rows, found.engine.limit) == (checkpoint.name, 1, 4, 32)
    assert found.engine.generate([[1, 2, 3]])[0].finish_reason in ("stop", "length")


# ---- faults --------------------------------------------------------------------------------------------------------

MISREAD = [
    ({"trainer": {"learnin_rate": 1}}, "trainer.learnin_rate: unknown key; did you mean 'learning_rate'?"),
    ({"trianer": {}}, "trianer: unknown key; did you mean 'trainer'?"),
    ({"trainer": {"scheduler": 3}}, "trainer.scheduler: found 3, expected text"),
    ({"trainer": {"total_batch_size": 4.5}}, "trainer.total_batch_size: found 4.5, expected a whole number or null"),
    ({"trainer": {"total_batch_size": True}}, "trainer.total_batch_size: found True, expected a whole number or null"),
    ({"trainer": {"learning_rate": "fast"}}, "trainer.learning_rate: found 'fast', expected a number or null"),
    ({"trainer": {"lora": 8}}, "trainer.lora: found 8, expected a mapping or null"),
    ({"loader": {"dtype": "bf61"}}, "loader.dtype: found 'bf61'; did you mean 'bf16'?"),
    ({"loader": []}, "loader: found [], expected a mapping"),
    ({"sharding": {"axis_dims": [1, "x"]}}, "sharding.axis_dims[1]: found 'x', expected a whole number"),
    ({"mixture": {"informs": [{}, {"typ": 1}]}}, "mixture.informs[1].typ: unknown key; did you mean 'type'?"),
    ({"mixture": {"mixture_weights": {"a": "b"}}}, "mixture.mixture_weights.a: found 'b', expected a number"),
    ({"actions": ["tran"]}, "actions[0]: 'tran' is no action; did you mean 'train'?"),
    ({"actions": "train"}, "actions: found 'train', expected a list"),
    ({"actions": [{"train": {"fast": True}}]}, "actions[0].train: found {'fast': True}, expected nothing"),
    ({"actions": [{"serve": {"prot": 1}}]}, "actions[0].serve.prot: unknown key; did you mean 'port'?"),
    ({"config": {}, "model": {}}, "model: unknown beside 'config'"),
]


@pytest.mark.parametrize(("document", "message"), MISREAD, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_be_read_is_told_with_its_path(document, message):
    with pytest.raises(recipe.RecipeError, match=re.escape(message)):
        recipe.from_dict(document)


def test_all_faults_are_told_at_once_and_keys_twice_in_yaml_too(tmp_path):
    with pytest.raises(recipe.RecipeError) as e:
        recipe.from_dict({"trainer": {"a": 1, "beta": "x"}, "loader": {"dtype": 1}})
    assert len(str(e.value).splitlines()) == 4
    file = tmp_path / "r.yaml"
    file.write_text("trainer:\n  seed: 1\nmixture:\n  informs:\n  - type: json\n    type: csv\ntrainer:\n  seed: 2\n")
    with pytest.raises(recipe.RecipeError, match="(?s)trainer: .* line 7.*type: stands twice, again in line 6"):
        recipe.from_yaml(file)


IMPOSSIBLE = [
    (
        {"loader": {"trust_remote_code": True}},
        "loader.trust_remote_code: True cannot be honoured: fdel never runs remote",
    ),
    ({"model": {"name_or_path": "m", "extra_kwargs": {"trust_remote_code": True}}}, "model.extra_kwargs.trust_remote"),
    ({"model": {}}, "model.name_or_path: missing"),
    ({"model": {"name_or_path": "m", "task": "image-classification"}}, "model.task: 'image-classification' cannot be"),
    ({"loader": {"from_torch": False}}, "loader.from_torch: False cannot be honoured"),
    ({"quantization": {"platform": "triton"}}, "quantization.platform: 'triton' cannot be honoured: fdel chooses"),
    ({"quantization": {"model": {"quantization_method": "a4bit"}}}, "quantization.model.quantization_method: "),
    (
        {"quantization": {"model": {"quantization_method": "nf4", "group_size": 0}}},
        "quantization.model.group_size: found 0, expected a positive number",
    ),
    ({"trainer": {"lora": {"r": 0}}}, "trainer.lora.r: found 0, expected a positive number"),
    ({"base_config": {"operation_configs": {"flash_attn2": {}}}}, "base_config.operation_configs: "),
    ({"sharding": {"sp_is_ep_bound": True}}, "sharding.sp_is_ep_bound: True cannot be honoured"),
    ({"sharding": {"axis_dims": [1, 1]}}, "sharding: found ['dp', 'fsdp', 'ep', 'tp', 'sp'] of [1, 1]"),
    ({"sharding": {"dcn_axis_dims": [2]}}, "sharding: found ['dp', 'fsdp', 'ep', 'tp', 'sp'] of [2]"),
    ({"sharding": {"dcn_axis_dims": [-1, 1, 1, 1, 1]}}, "sharding.dcn_axis_dims: found [-1, 1, 1, 1, 1], expected"),
    ({"sharding": {"rules": {"kv_head": None}}}, "sharding.rules.kv_head: no weight has that axis; did you mean"),
    ({"sharding": {"rules": {"embed": "data"}}}, "sharding.rules.embed: found 'data', expected null, or of dp, fsdp"),
    ({"sharding": {"rules": {"embed": 3}}}, "sharding.rules.embed: found 3, expected null, or of dp, fsdp"),
    ({"distributed": {"coordinator": "host"}}, "distributed.coordinator: found 'host', expected host:port, or auto"),
    ({"distributed": {"coordinator": "h:1", "processes": 2}}, "found processes 2 and process_id None, expected 0 <="),
    ({"distributed": {"processes": 2}}, "distributed.coordinator: missing; give the host:port"),
    ({"mixture": {}}, "mixture.informs: empty"),
    (
        {"mixture": {"informs": [{"type": "visual"}]}},
        "mixture.informs[0].type: visual: rows with images are of any type",
    ),
    ({"mixture": {"informs": [{"name": "a"}], "mixture_weights": {"b": 1}}}, "mixture.mixture_weights.b: no data set"),
    (
        {"mixture": {"informs": [{}], "batch_size": 16}, "trainer": {"total_batch_size": 8}},
        "16 differs from trainer.total",
    ),
    ({"trainer": {"trainer_type": "ppo"}}, "reward_functions: none; give at least one"),
    ({"trainer": {"trainer_type": "grpo"}}, "trainer: reward_functions: none; give at least one"),
    ({"trainer": {"beta": 0.1}}, "trainer.beta: trainer_type sft does not read it (dpo, "),
    ({"trainer": {"group_size": 4}}, "trainer.num_generations: trainer_type sft does not read it"),
    ({"trainer": {"gradient_accumulation_steps": 5}}, "5 does not divide the 32 rows of a step"),
    ({"trainer": {"optimizer": "adamv"}}, "trainer.optimizer: found 'adamv'; did you mean 'adamw'?"),
    ({"trainer": {"scheduler": "cosin"}}, "did you mean 'cosine'?"),
    ({"trainer": {"optimizer": "lion", "adam_beta2": 0.5}}, "trainer.adam_beta2: optimizer lion does not read it"),
    ({"trainer": {"gradient_checkpointing": "dots"}}, "gradient_checkpointing: 'dots' is not a policy"),
    ({"trainer": {"fcm_min_ratio": 0.1}}, "trainer.fcm_min_ratio: nothing reads it without fcm_max_ratio"),
    (
        {"trainer": {"fcm_min_ratio": 0.2, "fcm_max_ratio": 0.1}},
        "trainer: fcm_min_ratio=0.2, fcm_max_ratio=0.1; expected",
    ),
    (
        {"trainer": {"trainer_type": "dpo", "fcm_max_ratio": 0.1}},
        "fcm_max_ratio: trainer_type dpo does not read it (sft",
    ),
    ({"trainer": {"loss_type": "sigmoid"}}, "loss_type='sigmoid'; expected nll, or dft"),
    ({"loader": {"kernels": {"attnd": "flash"}}}, "loader.kernels: attnd=flash: no operation 'attnd' has"),
    ({"loader": {"kernels": {"attend": "flsh"}}}, "loader.kernels: attend: impl='flsh' is unknown"),
    ({"trainer": {"trainer_type": "dpo", "label_smoothing": 0.5}}, "label_smoothing=0.5 with loss_type='sigmoid'"),
    ({"trainer": {"trainer_type": "cpo", "loss_type": "aot"}}, "loss_type='aot'; expected one of sigmoid, simpo"),
    ({"trainer": {"trainer_type": "kto", "loss_type": ["kto", "bco"]}}, "only trainer_type dpo has several"),
    ({"trainer": {"trainer_type": "gkd", "beta": 2}, "teacher_model": {"name_or_path": "t"}}, "beta=2.0; expected a"),
    (
        {"trainer": {"trainer_type": "gkd", "top_k": 5}, "teacher_model": {"name_or_path": "t"}},
        "trainer: top_k: nothing is sampled with lmbda=0",
    ),
    ({"reference_model": {"name_or_path": "r"}}, "reference_model: trainer_type sft has none"),
    *(
        ({"trainer": {"trainer_type": "dpo", **keys}}, message)
        for keys, message in (
            ({"ref_model_sync_steps": 7}, "trainer.ref_model_sync_steps: nothing reads it without sync_ref_model"),
            ({"ref_model_mixup_alpha": 0.5}, "trainer.ref_model_mixup_alpha: nothing reads it without sync_ref_model"),
            ({"discopop_tau": 0.1}, "trainer.discopop_tau: loss_type sigmoid does not read it (discopop: yes)"),
            ({"f_alpha_divergence_coef": 0.1}, "f_divergence_type reverse_kl does not read it (alpha_divergence: yes)"),
            ({"loss_weights": [2.0]}, "loss_weights: loss_type sigmoid is one loss"),
            ({"loss_type": "sft"}, "loss_type sft alone compares nothing"),
            ({"greater_is_better": True}, "trainer.greater_is_better: nothing reads it without metric_for_best_model"),
            ({"early_stopping_patience": 2}, "early_stopping_patience: nothing reads it without metric_for_best_model"),
            ({"eval_batch_size": 8}, "trainer.eval_batch_size: nothing is evaluated"),
        )
    ),
    (
        {"trainer": {"trainer_type": "cpo", "simpo_gamma": 1}},
        "loss_type sigmoid does not read it (simpo, alphapo: yes)",
    ),
    ({"trainer": {"trainer_type": "cpo", "loss_type": "alphapo"}}, "alphapo needs alpha, such as 0.25"),
    ({"trainer": {"trainer_type": "distillation", "hidden_state_layers": [0]}}, "without hidden_state_loss_weight"),
    ({"trainer": {"trainer_type": "distillation", "attention_layers": [0]}}, "without attention_loss_weight"),
    ({"trainer": {"packing_strategy": "wrapped"}}, "trainer.packing_strategy: nothing is packed"),
    ({"trainer": {"assistant_only_loss": True, "completion_only_loss": False}}, "assistant_only_loss alone says"),
    ({"mixture": {"informs": [{}], "mixture_block_size": 4}}, "mixture.mixture_block_size: there are no weights"),
    ({"mixture": {"informs": [{}], "stop_strategy": "longest"}}, "mixture.stop_strategy: there are no weights"),
    ({"quantization": {"model": {"quantization_method": "w4a16", "group_size": 63}}}, "model.group_size: 63 is odd"),
    ({"quantization": {"model": {"group_size": 64}}}, "model.group_size: nothing reads it without quantization_method"),
    (
        {"quantization": {"straight_through": True}},
        "straight_through: nothing reads it without model.quantization_method",
    ),
    (
        {
            "quantization": {"model": {"quantization_method": "nf4"}, "straight_through": True},
            "trainer": {"lora": {"r": 4}},
        },
        "straight_through: adapters learn beside frozen weights",
    ),
    (
        {
            "quantization": {"model": {"quantization_method": "nf4"}, "straight_through": True},
            "trainer": {"trainer_type": "grpo", "reward_functions": [{"name": "exact"}]},
        },
        "straight_through: trainer_type grpo learns samples of the weights as they are",
    ),
    ({"esurge": {"truncate_mode": "left"}}, "esurge.truncate_mode: nothing reads it without auto_truncate_prompt"),
    (
        {"actions": [{"serve": {"enable_function_calling": False, "tool_parser_name": "hermes"}}]},
        "actions[0].serve.tool_parser_name: nothing reads it without enable_function_calling",
    ),
    ({"actions": [{"serve": {"oai_like_processor": False}}]}, "actions[0].serve.oai_like_processor: False cannot be"),
    ({"trainer": {"lora": {}, "optimizer": "muon"}}, "muon has no form for adapters"),
    ({"loader": {"dtype": "fp16"}}, "loader: fp16 needs scaled losses"),
    ({"trainer": {"evaluation_steps": 5}}, "evaluation needs both"),
    ({"actions": ["to_yaml"]}, "actions[0]: to_yaml: no path"),
]


@pytest.mark.parametrize(("sections", "message"), IMPOSSIBLE, ids=lambda x: x[:40] if isinstance(x, str) else "")
def test_what_cannot_be_done_is_refused(sections, message):
    assert recipe.faults(made()) == []
    with pytest.raises(recipe.RecipeError, match=re.escape(message)):
        recipe.validate(made(**sections))


@pytest.mark.parametrize(("trainer_type", "keys", "message"), [
    ("sft", {"require_api_key": True}, "api_key_file: missing"),
    ("sft", {"require_api_key": False, "api_key_file": "k"}, "require_api_key is false, so that nobody reads it"),
    ("sft", {"host": "0.0.0.0"}, "0.0.0.0"),
])  # fmt: skip
def test_what_cannot_be_served_is_refused_before_the_training(trainer_type, keys, message):
    found = made(trainer={"trainer_type": trainer_type}, actions=["train", {"serve": keys}])
    with pytest.raises(ValueError, match=re.escape(message)):  # a directory "m" to train does not exist
        recipe.run(found)


@pytest.mark.parametrize("kind", methods.types(head=True, samples=False))
def test_what_writes_no_text_has_no_benchmarks(kind):
    keys = {"labels": ["no", "yes"]} if kind == "token_classification" else {}
    found = made(trainer={"trainer_type": kind, **keys}, actions=["train", {"eval": {"tasks": ["hellaswag"]}}])
    with pytest.raises(recipe.RecipeError, match=f"of trainer_type {kind} writes no text"):
        recipe.run(found)


# ---- a value -------------------------------------------------------------------------------------------------------


def test_set_gives_a_changed_recipe_and_leaves_the_old_one():
    old = made()
    new = old.set("trainer.learning_rate", 2e-5).set("trainer.lora", {"r": 4}).set("trainer.clip_grad", None)
    assert (new.trainer.learning_rate, new.trainer.lora, new.trainer.clip_grad) == (2e-5, methods.Lora(r=4), None)
    assert old == made() and new.set("trainer", None) == old
    assert new.set("mixture", new.mixture) == new
    with pytest.raises(recipe.RecipeError, match="did you mean 'learning_rate'"):
        old.set("trainer.learning_rat", 1)
    with pytest.raises(recipe.RecipeError, match="'informs' is no section"):
        old.set("mixture.informs.type", "csv")
    with pytest.raises(dataclasses.FrozenInstanceError):
        old.trainer.seed = 3
    with pytest.raises(TypeError):
        made(base_config={"values": {"a": 1}}).base_config.values["a"] = 2


def test_yaml_numbers_without_a_point_are_numbers():
    assert made(trainer=yaml.safe_load("learning_rate: 2e-5")).trainer.learning_rate == 2e-5


def test_every_key_has_a_reader():
    """A key that nothing reads would be ignored: all but those refused are read in the code, or name a setting."""
    code = "\n".join(p.read_text() for p in (ROOT / "fdel" / "recipe").rglob("*.py") if p.name != "schema.py")
    sections = [schema.Model, schema.Loader, schema.Sharding, schema.Quantization, schema.BaseConfig, schema.Inform]
    sections += [schema.Mixture, schema.Tokenization, schema.Save, trainer.Trainer, methods.Lora, schema.Extra]
    sections += [schema.Eval, schema.EvalAction, schema.Esurge, schema.ServeAction]
    keys = [(c, f) for c in sections for f in dataclasses.fields(c)]
    asked = [(c, f) for c, f in keys if not f.metadata["refuse"]]
    policy = {f.name for f in dataclasses.fields(losses.Policy)}  # methods/samples.py hands all of these over
    asked = [(c, f) for c, f in asked if not f.metadata.get("setting") and f.name not in policy]
    unread = [f"{c.__name__}.{f.name}" for c, f in asked if not re.search(rf"\.{f.name}\b", code)]
    assert unread == []


# ---- parts ---------------------------------------------------------------------------------------------------------


def test_base_config_changes_the_config_and_refuses_what_nothing_reads(checkpoint):
    wanted = made(model={"name_or_path": str(checkpoint)}, sharding={"axis_dims": [1] * 5})
    found = recipe.build_model(wanted.set("base_config.values", {"rms_norm_eps": 0.5, "max_position_embeddings": 64}))
    assert (found.cfg.norm_eps, found.cfg.max_positions) == (0.5, 64)
    with pytest.raises(recipe.RecipeError, match="attn_dtype: .*llama does not read"):
        recipe.build_model(wanted.set("base_config.values", {"attn_dtype": "float32"}))
    with pytest.raises(recipe.RecipeError, match="other shapes"):
        recipe.build_model(wanted.set("base_config.values", {"intermediate_size": 64}))


def test_rules_of_a_run_file_place_weights(checkpoint):
    """For training and for serving, over fdel's own; more devices than key-value heads need none."""
    wanted = made(model={"name_or_path": str(checkpoint)}, sharding={"axis_dims": [1, 2, 1, 4, 1]})
    assert CFG.kv_heads < 4 and recipe.build_mesh(wanted).shape["tp"] == 4
    k = recipe.build_model(wanted).params["layers"]["k"].sharding
    assert k.spec[1] == "tp" and k.mesh.shape["tp"] == CFG.kv_heads
    ruled = wanted.set("sharding.rules", {"kv_heads": None, "ffn": ["fsdp", "tp"], "embed": None})
    found = recipe.build_model(ruled).params["layers"]
    assert found["k"].sharding.is_fully_replicated and found["gate"].sharding.spec[1] == ("fsdp", "tp")
    served = serving.load(ruled).params["layers"][0]
    assert served["k"].sharding.is_fully_replicated and served["gate"].sharding.spec[0] == ("fsdp", "tp")
    with pytest.raises(ValueError, match="slices .* are 2, found 1 processes"):
        recipe.build_mesh(wanted.set("sharding.dcn_axis_dims", [2, 1, 1, 1, 1]))


def test_lora_targets_are_the_modules_of_that_name():
    spec = llama.spec(dataclasses.replace(CFG, layers=3))

    def matching(*wanted, pattern=None) -> list[str]:
        where = config.lora_targets(methods.Lora(target_modules=pattern or wanted), spec)
        return [path for path, _ in params.named_leaves(spec) if re.search(where, path)]

    assert matching("q_proj", "down_proj") == ["layers.down", "layers.q"]
    assert matching("self_attn.q_proj") == ["layers.q"] and matching("lm_head") == ["head"]
    # As in PEFT, a text is a pattern of whole names.
    assert matching(pattern=r".*\.(q|v)_proj") == ["layers.q", "layers.v"]
    assert matching(pattern=r"model\.layers\.\d+\.mlp\.up_proj|lm_head") == ["head", "layers.up"]
    for wanted, message in (
        (("q_prj",), "'q_prj' is no matrix; did you mean 'q_proj'"),
        (("norm",), "'norm' is no matrix; known are down_proj"),
        (("input_layernorm",), "'input_layernorm' is no matrix"),
        ("q_proj", "no module matches the pattern 'q_proj'; modules are called lm_head, model.embed_tokens"),
        (r".*layers\.[01]\..*q_proj", "matches some layers of layers.q and not all"), ("(", "is no pattern: missing )"),
    ):  # fmt: skip
        with pytest.raises(recipe.RecipeError, match=re.escape(message)):
            config.lora_targets(methods.Lora(target_modules=wanted), spec)


@pytest.mark.slow
def test_a_pattern_that_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr(config, "SECONDS", 1)
    with pytest.raises(recipe.RecipeError, match="takes more than 1 s to match"):
        config.lora_targets(methods.Lora(target_modules=r"(([a-z_.0-9])+)+!"), llama.spec(CFG))


@pytest.mark.slow
def test_models_are_loaded_quantized_and_adapted(checkpoint):
    wanted = recipe.from_dict(QLORA).set("model.name_or_path", str(checkpoint)).set("sharding.axis_dims", [1] * 5)
    w = recipe.build_model(wanted).params["layers"]["q"]
    assert w.base.format == "nf4" and w.a.shape[-2] == 16 and np.all(np.asarray(w.scale) == 2)
    assert recipe.build_model(wanted).params["embed"].dtype == jnp.bfloat16


def test_data_settings_follow_their_keys():
    change = lambda **mixture: recipe.build_settings(made(mixture={"informs": [{"data_files": "d"}]} | mixture))
    assert change(shuffle_buffer_size=0).shuffle is False and change(shuffle_buffer_size=99).window == 99
    assert change(tokenization={"max_length": 77}).length == 77
    assert change(tokenization={"truncation": False}).overlong == "drop"
    assert change(pack_on_the_fly=True).stream and change(stop_strategy="longest").stop == "longest"
    assert change(prefetch_workers=7, prefetch_buffer_size=8, seed=3) == dataclasses.replace(
        change(), threads=7, prefetch=8, seed=3
    )
    ask = lambda **t: recipe.build_settings(made(trainer=t))
    assert ask(max_training_steps=5).epochs is None and ask(max_training_steps=5, num_train_epochs=2).epochs == 2
    apo = ask(trainer_type="kto", loss_type="apo_zero_unpaired")
    assert ask(trainer_type="kto").mismatched and not ask(trainer_type="bco").mismatched and not apo.mismatched
    assert apo.kind == ask(trainer_type="bco").kind == "unpaired" and ask(trainer_type="reward").overlong == "drop"
    assert [ask(completion_only_loss=c).learn for c in (None, True, False)] == ["auto", "completion", "all"]
    assert ask(assistant_only_loss=True).learn == "assistant"
    assert ask(packing=True, packing_strategy="wrapped").packing == "wrapped"
    forgetful = made(trainer={"fcm_min_ratio": 0.1, "fcm_max_ratio": 0.3})
    ratios = lambda s: (s.fcm_min_ratio, s.fcm_max_ratio)
    assert ratios(recipe.build_settings(forgetful)) == (0.1, 0.3)
    assert ratios(evaluation_settings(forgetful)) == (0.0, 0.0)
    weighted = made(mixture={"informs": [{"type": "csv", "data_files": "d", "name": "a"}], "mixture_weights": {"a": 2}})
    (source,) = recipe.build_sources(weighted, weighted.mixture.informs)
    assert (source.weight, source.format) == (2.0, "csv")


def test_a_hub_data_set_is_fetched_by_its_name(tmp_path, monkeypatch):
    hub, asked = pytest.importorskip("huggingface_hub"), []
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **kw: asked.append((name, kw)) or str(tmp_path))
    (source,) = recipe.build_sources(recipe.from_dict(QLORA), recipe.from_dict(QLORA).mixture.informs)
    assert asked == [("databricks/dolly-15k", {"repo_type": "dataset"})] and source.files == (str(tmp_path),)


def test_texts_end_with_the_token_that_is_asked_for(checkpoint):
    wanted, tok = made(model={"name_or_path": str(checkpoint)}), text.load(checkpoint)
    ending = recipe.data.ending(wanted.set("mixture.pack_eos_token_id", 65), tok)
    assert (ending.ids["eos"], tok.ids["eos"], recipe.data.ending(wanted, tok)) == (65, 0, tok)
    with pytest.raises(recipe.RecipeError, match="has no token 999"):
        recipe.data.ending(wanted.set("mixture.pack_eos_token_id", 999), tok)


def test_a_plan_is_made_of_a_run_file(checkpoint):
    wanted = recipe.from_dict(SFT).set("model.name_or_path", str(checkpoint))
    family, cfg, training = recipe.planned(wanted.set("trainer.gradient_checkpointing", "dots_saveable"))
    asked = ("dp=1,fsdp=-1,ep=1,tp=1,sp=1", 32, 2048, 4, "bfloat16", "adamw", "dots_saveable")
    assert (family, cfg, dataclasses.astuple(training)) == (llama, models.read_config(checkpoint)[1], asked)
    with pytest.raises(recipe.RecipeError, match="plan knows the step of trainer_type sft"):
        recipe.planned(wanted.set("trainer.lora", {}))


def test_a_ring_of_experts_is_an_implementation():
    """EasyDeL's key; what `loader.kernels` says of it comes first."""
    ring = recipe.from_dict(SFT).set("sharding.use_ring_of_experts", True)
    assert (
        recipe.settle(ring).kernels == {"expert_parallel": "ring"}
        and recipe.settle(recipe.from_dict(SFT)).kernels == {}
    )
    named = ring.set("loader.kernels", {"expert_parallel": "all_to_all", "moe": "fused_moe"})
    assert recipe.settle(named).kernels == {"expert_parallel": "all_to_all", "moe": "fused_moe"}


def test_an_implementation_that_is_named_computes_the_step_and_the_server(checkpoint):
    """One that cannot serve here says why; nothing else is taken in its place."""
    wanted = (
        recipe.from_dict(SFT).set("model.name_or_path", str(checkpoint)).set("loader.kernels", {"attend": "splash"})
    )
    model = models.Model(llama, CFG, weights())
    mesh = recipe.build_mesh(wanted)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="attend: impl='splash' cannot serve this call"):
        training = recipe.build_step(wanted, model, 2, mesh)
        jax.eval_shape(training.step, training.state, rows(np.random.default_rng(0), 4))
    asked = cli.parser("serve").parse_args(["serve", "m", "--kernel", "attend=splash"])
    assert serving.settings(wanted).kernels == {"attend": "splash"} == options.chosen(serve.Settings, asked).kernels


def test_an_implementation_of_an_operation_that_no_step_has_is_told(checkpoint, caplog):
    wanted = recipe.from_dict(SFT).set("model.name_or_path", str(checkpoint))
    wanted = wanted.set("loader.kernels", {"ssd": "mosaic", "attend": "flash"})
    mesh = recipe.build_mesh(wanted)
    with jax.set_mesh(mesh):
        training = recipe.build_step(wanted, models.Model(llama, CFG, weights()), 2, mesh)
        jax.eval_shape(training.step, training.state, rows(np.random.default_rng(0), 4))
    (said,) = [r.getMessage() for r in caplog.records if "loader.kernels" in r.getMessage()]
    assert said.startswith("loader.kernels: in a training step ssd=mosaic has no effect") and "attend, " in said


def rows(rng, *shape) -> dict:
    """A batch of rows with prompts of three tokens, [*shape, 12]."""
    mask = np.broadcast_to(np.arange(12) > 2, (*shape, 12))
    return {"tokens": rng.integers(0, 300, (*shape, 12)), "lengths": rng.integers(6, 13, shape), "mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [("kto", None), ("dpo", "aot"), ("dpo", ["sigmoid", "sft"])], ids=str)
def test_microbatches_change_no_loss(settings):
    """Losses whose rows depend on each other, and means over tokens: the same gradient in one part as in four."""
    model, rng = models.Model(llama, CFG, weights()), np.random.default_rng(0)
    batch = rows(rng, 8, 2)
    if settings[0] == "kto":
        batch = rows(rng, 8) | {"label": np.arange(8) % 3 > 0, "kl": rows(rng, 8)}
    given = {"reference": jax.tree.map(lambda x: 3 * x, model.params)}  # worse, so that KTO's reference point is not 0
    results = []
    for n in (1, 4):
        asked = {"trainer_type": settings[0], "loss_type": settings[1], "gradient_accumulation_steps": n, "beta": 1.0}
        g = jax.jit(recipe.build_objective(made(trainer=asked), model).grads)
        results.append(g(model.params, jax.tree.map(jnp.asarray, batch), given))
    (a, sums), (b, others) = results
    assert np.isclose(sums["loss"], others["loss"], rtol=1e-5)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(a))
    chex.assert_trees_all_close(a, b, rtol=1e-7, atol=2e-5 * scale)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpo", "simpo", "bco", "gkd", "dpo"])
@pytest.mark.parametrize("adapted", [False, True])
def test_each_objective_takes_what_it_is_given(kind, adapted):
    """Abstractly: the running mean, the frozen weights, the reference or the teacher."""
    rng, model = np.random.default_rng(0), models.Model(llama, CFG, params.abstract(llama.spec(CFG), jnp.float32))
    full = model.params
    if adapted:
        spec, key = llama.spec(CFG), jax.random.key(0)
        full = jax.eval_shape(lambda p: params.lora.add(p, 2, 4.0, key=key, spec=spec), model.params)
    trained, frozen = params.lora.split(full) if adapted else (full, None)
    batch = rows(rng, 8) | {"label": np.arange(8) % 2 > 0} if kind == "bco" else rows(rng, 8, *[2] * (kind != "gkd"))
    given = {"bco": {"mean": jnp.zeros(()), "count": jnp.zeros(())}, "base": frozen}
    given |= dict.fromkeys(
        {"gkd": ("teacher",), "bco": ("reference",), "dpo": ("reference",)}.get(kind, ()), model.params
    )
    lora = {"lora": {}} if adapted else {}
    asked = made(trainer={"trainer_type": kind, "gradient_accumulation_steps": 2, **lora})
    found = recipe.build_objective(asked, model, teacher=model)
    shapes, sums = jax.eval_shape(found.grads, trained, jax.tree.map(jnp.asarray, batch), given)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, trained)
    want = {"bco": "delta", "gkd": "divergence", "cpo": "nll_loss", "simpo": "nll_loss", "dpo": "mean_token_accuracy"}
    assert want[kind] in sums and jax.eval_shape(found.loss, trained, batch, given)[0].shape == ()


@pytest.mark.parametrize("adapted", [False, True])
def test_a_run_that_is_debugged_names_what_cannot_be_right(checkpoint, adapted):
    """On eight devices, with what a run composes around its step; of a model with adapters the frozen weights too."""
    lora = {"lora": {"r": 2}} if adapted else {}
    asked = {"debug": True, "gradient_accumulation_steps": 2, "max_length": 12, **lora}
    wanted = made(model={"name_or_path": str(checkpoint)}, trainer=asked)
    mesh = build.build_mesh(wanted)
    with jax.set_mesh(mesh):
        run = recipe.build_step(wanted, recipe.build_model(wanted, mesh), 4)
        batch = jax.device_put(rows(np.random.default_rng(0), 16), params.batch_sharding(mesh))
        kept = lambda: jax.tree.map(jnp.copy, run.state)  # a step's state is donated
        assert np.isfinite(run.step(kept(), batch, **run.given)[1]["loss"])
        spoil = lambda tree: jax.tree.map(lambda x: x * jnp.nan, tree)
        state = kept() if adapted else dataclasses.replace(kept(), params=spoil(run.state.params))
        with pytest.raises(checkify.JaxRuntimeError, match="base.embed: " if adapted else "params.embed: "):
            run.step(state, batch, **spoil(run.given))
        batch["tokens"] = batch["tokens"].at[3, 3].set(CFG.vocab)
        with pytest.raises(checkify.JaxRuntimeError, match=r"batch\.tokens: 1 of 192 .* ids of 0 \.\. 299"):
            run.step(kept(), batch, **run.given)


def test_hidden_states_are_matched_where_asked_for():
    """The keys reach the loss; models of two widths are refused with the reason."""
    model, wide = (
        models.Model(llama, cfg, params.abstract(llama.spec(cfg), jnp.float32))
        for cfg in (CFG, dataclasses.replace(CFG, embed=64))
    )
    keys = {"trainer_type": "distillation", "hidden_state_loss_weight": 0.5, "hidden_state_layers": [0, -1]}
    asked = made(trainer=keys)
    found = recipe.build_objective(asked, model, teacher=model)
    batch, given = rows(np.random.default_rng(0), 8), {"teacher": model.params}
    assert "hidden_loss" in jax.eval_shape(found.loss, model.params, batch, given)[1]
    with pytest.raises(ValueError, match="the student's hidden states have 32 channels and the teacher's 64"):
        recipe.build_objective(asked, model, teacher=wide)


@pytest.mark.slow
def test_attention_weights_are_matched_where_asked_for():
    """The keys change the loss by what is reported, in every microbatch, and the gradients of queries and keys."""
    model, other = models.Model(llama, CFG, weights()), jax.tree.map(lambda x: 4 * x, weights())
    batch, results = rows(np.random.default_rng(0), 8), []
    for keys in ({}, {"attention_loss_weight": 0.5, "attention_layers": [-1]}):
        asked = {"trainer_type": "distillation", "gradient_accumulation_steps": 2, **keys}
        wanted = made(trainer=asked, teacher_model={"name_or_path": "t"})
        assert recipe.faults(wanted) == []
        found = recipe.build_objective(wanted, model, teacher=model._replace(params=other))
        results.append(jax.jit(found.grads)(model.params, batch, {"teacher": other}))
    (plain, before), (matched, after) = results
    assert "attention_loss" not in before and after["attention_loss"] > 0.01 * after["weight"]
    np.testing.assert_allclose(after["loss"], before["loss"] + 0.5 * after["attention_loss"], rtol=1e-5)
    for i in "qk":
        change = np.abs(matched["layers"][i] - plain["layers"][i]).max()
        assert change > 0.01 * np.abs(plain["layers"][i]).max()
    np.testing.assert_allclose(matched["layers"]["down"], plain["layers"]["down"], rtol=1e-4, atol=1e-5)


def test_attention_that_cannot_be_matched_is_refused():
    model = models.Model(llama, CFG, params.abstract(llama.spec(CFG), jnp.float32))
    deep = models.Model(llama, dataclasses.replace(CFG, layers=3), None)
    keys = {"trainer_type": "distillation", "attention_loss_weight": 0.5}
    with pytest.raises(ValueError, match="the student has 1 layers that attend and the teacher 3"):
        recipe.build_objective(made(trainer=keys), model, teacher=deep)
    recipe.build_objective(made(trainer={**keys, "attention_layers": [0]}), model, teacher=deep)
    (fault,) = recipe.faults(made(trainer={**keys, "attention_normalize": True}, teacher_model={"name_or_path": "t"}))
    assert "a softmax sums to 1 already" in fault
    (fault,) = recipe.faults(made(trainer={"attention_loss_weight": 0.5}))
    assert "trainer.attention_loss_weight: trainer_type sft does not read it" in fault


@pytest.mark.parametrize("kind", ["dpo", "kto", "distillation", "ppo", "nash_md", "sdpo", "minillm", "iw_opd"])
def test_every_type_can_balance_its_experts(kind):
    cfg = mixtral.Config(vocab=300, embed=32, ffn=16, layers=1, heads=4, kv_heads=2, head_dim=8, experts=4,
                                rope=ops.Rope(8, 1e4))  # fmt: skip
    model = models.Model(mixtral, cfg, params.abstract(mixtral.spec(cfg), jnp.float32))
    more = {"kto": {"loss_type": "apo_zero_unpaired"}} | dict.fromkeys(
        ["ppo", "sdpo"], {"reward_functions": [{"name": "exact"}]}
    )
    keys = {"router_aux_loss_coef": 0.01, "router_capacity_factor": 1.25}
    wanted = made(trainer={"trainer_type": kind, **keys, **more.get(kind, {})})
    found = recipe.build_objective(wanted, model, teacher=model)
    batch = rows(np.random.default_rng(0), 8, *[2] * (kind == "dpo"))
    batch["label"] = np.arange(8) % 2 > 0
    if kind not in ("dpo", "kto", "distillation"):
        shape = batch["tokens"].shape
        batch["mask"] = np.broadcast_to(np.arange(shape[1]) > 0, shape)
        batch["places"] = losses.forward.learnt_places(batch, shape[1])
        batch |= {f"told_{k}": x for k, x in batch.items()}
        batch |= {
            k: np.ones(shape, np.float32) for k in ("advantages", "old", "logps", "values", "returns", "ref_logps")
        }
    spec = models.heads.spec(mixtral, cfg, "value") if kind == "ppo" else mixtral.spec(cfg)
    given = dict.fromkeys(("teacher", "reference"), model.params) | {"key": jax.random.key(0)}
    sums = jax.eval_shape(found.grads, params.abstract(spec, jnp.float32), batch, given)[1]
    assert {"aux_loss", "router_dropped"} <= sums.keys()


def test_steps_have_noise_and_a_capacity_and_evaluation_has_neither():
    """The noise is what config.json says, unless the run file says more; drops are a metric."""
    cfg = mixtral.Config(vocab=300, embed=32, ffn=16, layers=1, heads=4, kv_heads=2, head_dim=8, experts=4,
                                rope=ops.Rope(8, 1e4), jitter=0.1)  # fmt: skip
    model = models.Model(mixtral, cfg, params.abstract(mixtral.spec(cfg), jnp.float32))
    given = {"reference": model.params, "key": jax.random.key(0)}
    args = model.params, rows(np.random.default_rng(0), 8, 2), given

    def programs(**keys) -> list[tuple[bool, bool]]:
        """Whether noise is drawn and drops are counted, of a step and of evaluation."""
        found = recipe.build_objective(made(trainer={"trainer_type": "dpo", **keys}), model)
        each = [jax.make_jaxpr(f, return_shape=True)(*args) for f in (found.grads, found.loss)]
        return [("random_bits" in str(program), "router_dropped" in sums) for program, (_, sums) in each]

    none = (False, False)
    assert programs() == [(True, False), none]
    assert programs(router_jitter_noise=0.0) == [none, none]
    assert programs(router_jitter_noise=0.0, router_capacity_factor=1.25) == [(False, True), none]


@pytest.mark.parametrize(
    "keys", [{"router_aux_loss_coef": 0.01}, {"router_jitter_noise": 0.1}, {"router_capacity_factor": 1.25}], ids=str
)
def test_a_model_without_experts_has_no_load_to_balance(keys):
    model = models.Model(llama, CFG, params.abstract(llama.spec(CFG), jnp.float32))
    with pytest.raises(ValueError, match="has no experts"):
        recipe.build_objective(made(trainer=keys), model)


# ---- the command line ----------------------------------------------------------------------------------------------


def test_the_command_line_prints_checks_and_writes(tmp_path, capsys):
    file, out = tmp_path / "r.yaml", tmp_path / "out.json"
    wanted = made(actions=["validate", "print", {"to_json": str(out)}, "config"])
    wanted.to_yaml(file)
    assert cli.main(["run", str(file), "--dry-run", "--set", "trainer.learning_rate=3e-4"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["trainer"]["learning_rate"] == 3e-4 and shown["trainer"]["clip_grad"] == 1.0
    assert cli.main(["run", "--config", str(file)]) == 0
    assert recipe.from_json(out) == wanted
    printed = capsys.readouterr().out
    assert "32 rows of 1024 tokens" in printed and "mixture.informs[0].data_files = 'd.jsonl'" in printed
    assert cli.main(["run", str(file), "--set", "trainer.sheduler=cosine"]) == 2
    assert "did you mean 'scheduler'" in capsys.readouterr().err
    assert cli.main(["run", "--keys"]) == 0
    keys = capsys.readouterr().out.splitlines()
    assert len(keys) > 150 and max(map(len, keys)) <= 120 and all(f"{s}:" in " ".join(keys) for s in KEPT)
    at = next(i for i, line in enumerate(keys) if line.startswith("trainer.lora: train adapters"))
    assert "r rank (a whole number; 16)" in [" ".join(line.split()) for line in keys[at : at + 8]]
    assert read.load(out) == wanted


@pytest.mark.slow
def test_python_m_fdel_takes_a_run_file(tmp_path):
    file = tmp_path / "r.yaml"
    made().to_yaml(file)
    done = subprocess.run(
        [sys.executable, "-m", "fdel", str(file), "--dry-run"], capture_output=True, text=True, check=True
    )
    assert yaml.safe_load(done.stdout)["trainer"]["trainer_type"] == "sft"
