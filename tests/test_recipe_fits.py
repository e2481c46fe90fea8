"""What validate and --dry-run find before anything is loaded: values, modules, sizes; messages that know other projects."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from fdel import cli, models, ops, params, recipe, text
from fdel.models import llama
from fdel.recipe import methods, names, parse, schema, trainer
from fdel.train import metrics

CFG = llama.Config(vocab=300, embed=32, ffn=48, layers=2, heads=4, kv_heads=2, head_dim=8, max_positions=128,
                   rope=ops.Rope(8, 1e4))  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    models.save(models.Model(llama, CFG, params.init(llama.spec(CFG), jax.random.key(0), dtype=jnp.float32)), path)
    text.save(text.train_bpe(["hello world, hello token"], 300), path)
    (path / "rows.jsonl").write_text('{"text": "hello world, hello token, hello"}\n' * 16)
    return path


def made(checkpoint: Path, **sections) -> recipe.Recipe:
    base = {"model": {"name_or_path": str(checkpoint)}, "sharding": {"axis_dims": [1] * 5}, "actions": ["train"]}
    base |= {"mixture": {"informs": [{"data_files": str(checkpoint / "rows.jsonl")}]}}
    return recipe.from_dict({**base, **sections})


SERVE, EVAL = ["serve"], [{"eval": {"tasks": ["x"]}}]
APART = {"trainer_type": "grpo", "reward_functions": [{"name": "exact"}], "sampling_devices": 2}
UNFIT = [
    ({"base_config": {"values": {"attn_dtype": "float32"}}}, "attn_dtype: llama does not read it; fdel calls it loader.dt"),
    ({"base_config": {"values": {"use_scan_mlp": True}}}, "use_scan_mlp: llama does not read it; fdel calls it trainer"),
    ({"base_config": {"values": {"fcm_max_ratio": 0.1}}}, "llama does not read it; fdel calls it trainer.fcm_max_ratio"),
    ({"base_config": {"values": {"attn_mechanism": "sdpa"}}}, "fdel calls it loader.kernels (as {attend: vanilla}; "),
    ({"base_config": {"values": {"fsdp_is_ep_bound": True}}}, "EasyDeL has it; here: experts are divided along `ep` alone"),
    ({"loader": {"kernels": {"attend": "foo"}}, "actions": SERVE}, "loader.kernels: attend: impl='foo' is unknown"),
    ({"base_config": {"values": {"foo": 1, "bar": 2}}}, "bar: llama does not read it; known are attention_bias, "),
    ({"base_config": {"values": {"rms_norm_ep": 1}}}, "rms_norm_ep: llama does not read it; did you mean 'rms_norm_eps'?"),
    ({"base_config": {"values": {"rms_norm_eps": "x"}}}, "base_config.values.rms_norm_eps: 'x': config field"),
    ({"base_config": {"values": {"intermediate_size": 64}}}, "tensors have other shapes than these values ask for"),
    ({"base_config": {"values": {"foo": 1}}, "actions": SERVE}, "base_config.values.foo: llama does not read it"),
    ({"base_config": {"values": {"foo": 1}}, "actions": EVAL}, "base_config.values.foo: llama does not read it"),
    ({"trainer": {"lora": {"target_modules": ["input_layernorm"]}}}, "'input_layernorm' is no matrix"),
    ({"trainer": {"lora": {"target_modules": "(a+)+$"}}}, "target_modules: no module matches the pattern"),
    ({"trainer": {"router_aux_loss_coef": 0.1}}, "trainer: "),
    ({"sharding": {"axis_dims": [1, 4, 8, 1, 1]}}, "sharding.axis_dims: 32 devices are asked for, and 8 are there"),
    ({"trainer": APART | {"sampling_devices": 8}}, "sampling_devices: 8 of 8 devices leave none"),
    ({"trainer": APART, "sharding": {"axis_dims": [1, 8, 1, 1, 1]}},
     "sharding.axis_dims: 8 devices are asked for, and 6 are there"),
    ({"sharding": {"axis_dims": [1, -1, 3, 1, 1]}}, "sharding.axis_dims: a multiple of 3 devices are asked for, and 8"),
    ({"sharding": {"axis_dims": [1, -1, -1, 1, 1]}}, "sharding.axis_dims: fsdp, ep: each size is at least 1, and at"),
    ({"sharding": {"axis_dims": [8, 1, 1, 1, 1]}, "trainer": {"total_batch_size": 12}}, "12 rows cannot be divided"),
    ({"esurge": {"max_num_seqs": 0}}, "esurge.max_num_seqs: found 0, expected 1 or more"),
    ({"esurge": {"max_model_len": -1}, "actions": SERVE}, "esurge.max_model_len: found -1, expected 1 or more"),
    ({"esurge": {"hbm_utilization": 1.5}, "actions": ["validate"]}, "esurge.hbm_utilization: found 1.5, expected a share"),
    ({"esurge": {"max_model_len": 8192}, "actions": SERVE}, "esurge.max_model_len: found 8192, and the model has 128 pos"),
    ({"esurge": {"max_model_len": 8192}, "actions": ["train", "serve"]}, "found 8192, and the model has 128 positions"),
    ({"model": {"name_or_path": "./nowhere"}}, "model.name_or_path: ./nowhere is no directory"),
    ({"model": {"name_or_path": "m", "config": {}}}, "give one of the two"),
    ({"model": {"config": {"model_type": "llama"}}}, "model.tokenizer: missing; random weights have none"),
    ({"model": {"config": {"model_type": "llama"}, "tokenizer": "t"}}, "config field 'vocab_size' is missing"),
    ({"model": {"config": {"model_type": "llama"}, "tokenizer": "t"}, "actions": SERVE}, "have nothing to say to serve"),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "message"), UNFIT, ids=lambda x: x[:50] if isinstance(x, str) else "")
def test_what_does_not_fit_is_found_before_anything_is_loaded(sections, message, checkpoint, monkeypatch):
    monkeypatch.setattr(models, "load", None)
    recipe.validate(made(checkpoint), 8)
    with pytest.raises(recipe.RecipeError, match=re.escape(message)) as e:
        recipe.prepare(made(checkpoint, **sections), 8)
    assert "mappingproxy" not in str(e.value) and "rules |" not in str(e.value) and "rows=" not in str(e.value)


def test_an_unknown_value_of_the_config_is_not_among_the_known(checkpoint):
    """The second line listed the first line's key as known."""
    with pytest.raises(recipe.RecipeError) as e:
        recipe.validate(made(checkpoint, base_config={"values": {"zzz": 1, "yyy": 2}}))
    _, first, second = str(e.value).splitlines()
    assert "values.yyy" in second and "zzz" not in second and "vocab_size" in first


def test_a_dry_run_may_be_for_other_devices(checkpoint, tmp_path, capsys):
    made(checkpoint, sharding={"axis_dims": [1, 4, 1, 2, 1]}).to_yaml(tmp_path / "r.yaml")
    assert cli.main(["run", str(tmp_path / "r.yaml"), "--dry-run", "--devices", "16"]) == 2
    assert "8 devices are asked for, and 16 are there" in capsys.readouterr().err
    assert cli.main(["run", str(tmp_path / "r.yaml"), "--dry-run", "--devices", "8"]) == 0
    made(checkpoint, sharding={"axis_dims": [1, 1, 1, -1, 1]}).to_yaml(tmp_path / "r.yaml")
    assert cli.main(["run", str(tmp_path / "r.yaml"), "--dry-run", "--devices", "3"]) == 2
    said = capsys.readouterr().err
    assert "not divisible by tp=3; use " in said and "rules |" not in said


def test_a_model_on_the_hub_is_not_fetched_by_validation(checkpoint):
    recipe.validate(made(checkpoint, model={"name_or_path": "some-organisation/some-model"}))


@pytest.mark.slow
def test_data_for_less_than_a_step_says_so_in_words_of_run_files(checkpoint, tmp_path):
    wanted = made(checkpoint, trainer={"total_batch_size": 64, "save_directory": str(tmp_path / "out")})
    with pytest.raises(recipe.RecipeError, match=r"(?s)mixture.informs: .*or a smaller trainer.total_batch_size"):
        recipe.train(wanted)


# ---- names of other projects ---------------------------------------------------------------------------------------

UNKNOWN = [
    ({"trainer": {"trainer_type": "ray"}}, "trainer.trainer_type: found 'ray'; EasyDeL has it; here: Ray is not in"),
    ({"trainer": {"trainer_type": "dapo"}}, "found 'dapo'; fdel calls it grpo (whose loss_type it is)"),
    ({"trainer": {"trainer_type": "nash-md"}}, "found 'nash-md'; fdel calls it nash_md"),
    ({"trainer": {"trainer_type": "odpo"}}, "found 'odpo'; known are sft, dpo, cpo,"),
    ({"trainer": {"progress_bar_type": "tqdm"}}, "progress_bar_type: unknown key; EasyDeL has it; here: there is one"),
    ({"trainer": {"auto_shard_states": True}}, "the optimizer's state is always divided as its parameters"),
    ({"trainer": {"dataset_text_field": "t"}}, "unknown key; fdel calls it mixture.informs[].content_field"),
    ({"trainer": {"per_device_train_batch_size": 4}}, "fdel calls it total_batch_size (rows of a step on all devices"),
    ({"trainer": {"quux": 4}}, "trainer.quux: unknown key; `fdel run --keys` lists what there is"),
    ({"trainer": {"optimizer": "rmsprop"}}, "trainer.optimizer: found 'rmsprop'; EasyDeL has it; here: not in"),
    ({"trainer": {"scheduler": "none"}}, "trainer.scheduler: found 'none'; fdel calls it constant"),
    ({"trainer": {"report_steps": 5, "log_steps": 6}}, "trainer.report_steps: is log_steps, which is given too"),
    ({"trainer": {"report_steps": 5, "logging_steps": 6}}, "trainer.logging_steps: is log_steps, which is given too"),
    ({"quantization": {"block_size": 64}}, "quantization.block_size: unknown key; fdel calls it model.group_size"),
    ({"mixture": {"streaming": True}}, "mixture.streaming: unknown key; fdel calls it pack_on_the_fly"),
    ({"quantization": {"model": {"quantization_method": "nf8"}}}, "found 'nf8'; known are int8, fp8, nf4, mxfp4,"),
    ({"sharding": {"partition_axis": {}}}, "sharding.partition_axis: unknown key; fdel calls it sharding.rules"),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "message"), UNKNOWN, ids=lambda x: x[:50] if isinstance(x, str) else "")
def test_names_of_other_projects_are_known_and_no_method_is_taken_for_another(sections, message, checkpoint):
    with pytest.raises(recipe.RecipeError, match=re.escape(message)) as e:
        recipe.validate(made(checkpoint, **sections))
    assert "did you mean" not in str(e.value) and len(str(e.value)) < 350


def test_a_family_that_is_not_here_is_not_taken_for_another():
    for other in ("qwen9", "mistral9", "t5"):
        with pytest.raises(models.ConfigError) as e:
            models.family(other)
        assert "did you mean" not in str(e.value) and "llama" in str(e.value)
    with pytest.raises(models.ConfigError, match="'whisper', which writes down sounds; .*fdel serve"):
        models.family("whisper")


def test_synonyms_mean_the_same(checkpoint):
    ours = made(
        checkpoint,
        trainer={"log_steps": 5, "save_directory": "x", "max_length": 64, "adam_epsilon": 1e-6, "lora": {"r": 4}},
        mixture={"informs": [{"type": "json", "content_field": "body", "data_files": "d"}]},
        quantization={"model": {"quantization_method": "nf4", "group_size": 32}},
    )
    theirs = made(
        checkpoint,
        trainer={"report_steps": 5, "output_dir": "x", "max_seq_length": 64, "adam_eps": 1e-6, "lora": {"rank": 4}},
        mixture={"informs": [{"dataset_type": "json", "dataset_text_field": "body", "data_files": "d"}]},
        quantization={"model": {"dtype": "nf4", "block_size": 32}},
    )
    assert ours == theirs


SECTIONS = {
    "": recipe.Recipe, "model": schema.Model, "loader": schema.Loader, "sharding": schema.Sharding,
    "quantization": schema.Quantization, "quantization.model": schema.Format, "esurge": schema.Esurge,
    "mixture": schema.Mixture, "mixture.informs": schema.Inform, "mixture.save": schema.Save, "trainer": trainer.Trainer,
    "trainer.lora": methods.Lora, "actions.serve": schema.ServeAction,
}  # fmt: skip


def test_the_table_of_names_agrees_with_the_keys():
    """No row is a key of fdel's own; what fdel is said to call it exists; a synonym is in the same section."""
    known = {re.sub(r"\[\]", "", where) for where, *_ in parse.table(recipe.Recipe)}
    for section, found in names.rows().items():
        keys = {f for f in SECTIONS[section].__dataclass_fields__} if section in SECTIONS else set()
        assert not keys & {*found}, section
        for name, (projects, ours, note) in found.items():
            assert set(projects.split(", ")) <= {"EasyDeL", "EasyLM", "TRL", "transformers", "vLLM"} and (
                ours or note
            ), name
            if ours.startswith("="):
                assert ours[1:] in keys, (section, name)
            elif ours and section in SECTIONS:
                path = ours.replace("[]", "")
                at = f"{section}." if section else ""
                fields = (
                    path in known or f"{at}{path}" in known or path in keys or path.startswith("base_config.values")
                )
                assert fields, (section, name, ours)


# ---- random weights, values when serving ---------------------------------------------------------------------------

SIZES = {"model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


@pytest.mark.slow
def test_a_run_starts_from_random_weights(checkpoint, tmp_path, capsys):
    """A config in the file, and the same alone in a directory: the same seed gives the same curve, another another."""
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "config.json").write_text(json.dumps(SIZES | {"hidden_size": 16}))
    how = {"max_training_steps": 2, "total_batch_size": 4, "max_length": 16, "log_steps": 1, "learning_rate": 1e-2}
    curves = []
    for i, (model, values, seed) in enumerate([
        ({"config": SIZES}, {}, 42), ({"name_or_path": str(tmp_path / "alone")}, {"hidden_size": 32}, 42),
        ({"config": SIZES}, {}, 43),
    ]):  # fmt: skip
        out = tmp_path / f"run-{i}"
        model |= {"tokenizer": str(checkpoint)}
        train = how | {"seed": seed, "save_directory": str(out)}
        wanted = made(
            checkpoint, model=model, trainer=train, base_config={"values": values}, actions=["validate", "train"]
        )
        nothing, (trained, directory, _) = recipe.run(wanted)
        assert nothing is None and trained.cfg.embed == 32 and directory == out / "model"
        curves.append([row["loss"] for row in metrics.read(out)])
    assert curves[0] == curves[1] != curves[2] and abs(curves[0][0] - np.log(300)) < 0.3
    assert f"random weights, of trainer.seed {seed}" in capsys.readouterr().err
    assert models.load(out / "model").cfg.max_positions == 64  # a whole checkpoint


def test_random_weights_cannot_be_adapted(checkpoint):
    wanted = made(checkpoint, model={"config": SIZES, "tokenizer": "t"}, trainer={"lora": {}})
    with pytest.raises(recipe.RecipeError, match="adapters of random weights learn little"):
        recipe.validate(wanted)


def test_serving_reads_the_values_of_the_config_too(checkpoint):
    wanted = made(checkpoint, base_config={"values": {"rms_norm_eps": 0.5}}, actions=["serve"])
    assert recipe.serving.load(wanted).cfg.norm_eps == 0.5


# ---- a value, and the command line ---------------------------------------------------------------------------------


def test_merging_changes_what_is_said_and_leaves_the_rest(checkpoint):
    old = made(checkpoint, trainer={"seed": 3, "lora": {"r": 4}}, base_config={"values": {"a": {"x": 1}, "b": 2}})
    new = old.merge(
        {"trainer": {"learning_rate": 1e-3, "lora": {"lora_alpha": 8}}, "base_config": {"values": {"a": {"y": 2}}}}
    )
    assert (new.trainer.seed, new.trainer.learning_rate, new.trainer.lora) == (3, 1e-3, methods.Lora(4, 8.0))
    assert parse.plain(new.base_config.values) == {"a": {"x": 1, "y": 2}, "b": 2} and new.actions == old.actions
    assert old.merge({"trainer": None}).trainer == trainer.Trainer()
    assert yaml.safe_load(str(new)) == recipe.to_dict(new) and "\n  seed: 3\n" in str(new)


@pytest.mark.slow
def test_a_reader_that_leaves_ends_no_run(checkpoint, tmp_path):
    """`fdel run x.yaml | head -1`: the later actions are done, and it is no error."""
    made(checkpoint, actions=["print", "dump_config", {"to_json": str(tmp_path / "a.json")}]).to_yaml(
        tmp_path / "r.yaml"
    )
    command = [sys.executable, "-u", "-m", "fdel", "run", str(tmp_path / "r.yaml")]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run.stdout.readline()
    run.stdout.close()
    assert run.wait(120) == 0 and run.stderr.read() == "" and (tmp_path / "a.json").is_file()
