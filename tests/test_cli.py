"""The command line on a tiny checkpoint: what it prints, writes, refuses, and its exit codes."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types
import urllib.request
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import bench, cli, models, ops, params, report, serve, text
from fdel.models import llama
from fdel.ops.attention import ATTEND
from fdel.ops.weights import Quantized
from fdel.params.quantize import FORMATS
from fdel.recipe import schema
from fdel.serve.server import auth, keyfile, launch

CFG = llama.Config(vocab=300, embed=32, ffn=48, layers=3, heads=4, kv_heads=2, head_dim=8, rope=ops.Rope(8, 1e4))
SIZE = 2 * 300 * 32 + 3 * (2 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    weights = params.init(llama.spec(CFG), jax.random.key(0))
    models.save(models.Model(llama, CFG, weights), path)
    text.save(text.train_bpe(["hello world, hello token"], 300), path)
    return path


def test_info_counts_what_is_there(checkpoint, capsys):
    assert cli.main(["info", str(checkpoint), "--context", "100"]) == 0
    shown = dict(re.split(r"\s{2,}", line) for line in capsys.readouterr().out.strip().splitlines())
    assert shown["family"] == "llama"
    assert shown["parameters"] == f"{SIZE:,}"
    assert shown["bytes in float32"] == f"{4 * SIZE:,}"
    assert shown["tensors in files"] == str(3 + 3 * 9)
    matrices = 300 * 32 + 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    assert shown["FLOPs per token at context 100"] == f"{2 * matrices + 3 * 4 * 100 * 32:,}"
    assert shown["cache bytes per token (float32)"] == f"{2 * 3 * 2 * 8 * 4:,}"
    assert shown["cache bytes per sequence"] == "0"


def test_info_counts_only_the_experts_that_are_routed_to():
    module = models.family("mixtral")
    d = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1, num_local_experts=8, num_experts_per_tok=2)  # fmt: skip
    few = report.flops_per_token(module, module.Config.from_hf(d), 1)
    many = report.flops_per_token(module, module.Config.from_hf(d | {"num_experts_per_tok": 3}), 1)
    assert many - few == 2 * 3 * 16 * 24

    def one_tensor(p):  # the same experts where the file has all of them in one tensor, and each has a bias
        stacked = tuple(s for s in p.stacked if s[0] != "experts")
        return dataclasses.replace(p, stacked=stacked, hf=p.hf.replace("experts.{experts}", "experts"))

    def spec(cfg):
        layers = jax.tree.map(one_tensor, module.spec(cfg)["layers"])
        biases = {"up_bias": params.Param("experts ffn", (8, 24), params.spec.zeros, "experts.up_proj_bias")}
        return module.spec(cfg) | {"layers": layers | {"experts": layers["experts"] | biases}}

    other = types.SimpleNamespace(spec=spec, state_spec=module.state_spec)
    assert report.flops_per_token(other, module.Config.from_hf(d), 1) == few


def test_info_tabulates_shards_of_a_mesh_that_is_not_here(checkpoint, capsys):
    assert cli.main(["info", str(checkpoint), "--mesh", "fsdp=16,tp=2"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "(-, tp, fsdp)" in rows["layers.gate"] and rows["layers.gate"].endswith(f" {4 * 3 * 32 * 48 // 32:,}")
    assert cli.main(["info", str(checkpoint), "--mesh", "tp=4", "--rules", "serve"]) == 0
    out = capsys.readouterr().out
    assert "kv_heads: 2 on tp=4: 2 devices hold the same 1 of 2 in weights and cache" in out
    rows = {line.split()[0]: line.split()[-1] for line in out.splitlines() if line}
    assert rows["layers.k"] == f"{4 * 3 * 16 * 32 // 2:,}" and rows["layers.q"] == f"{4 * 3 * 32 * 32 // 4:,}"
    assert rows["cache"] == f"{2 * 3 * 2 * 8 * 4 // 2:,}"
    assert cli.main(["info", str(checkpoint), "--mesh", "tp=8"]) == 2
    assert "'heads' of size 4 is not divisible by tp=8" in capsys.readouterr().err
    assert cli.main(["info", str(checkpoint), "--mesh", "tp=-1"]) == 2
    assert "give every size" in capsys.readouterr().err


def test_convert_and_diff(checkpoint, tmp_path, capsys):
    assert cli.main(["diff", str(checkpoint), str(checkpoint)]) == 0
    assert capsys.readouterr().out == "equal\n"
    small = tmp_path / "bf16"
    assert cli.main(["convert", str(checkpoint), str(small), "--dtype", "bfloat16", "--shard-gb", "0.00003"]) == 0
    assert len(list(small.glob("model-*.safetensors"))) > 1 and (small / "tokenizer.json").exists()
    assert json.loads((small / "config.json").read_text())["dtype"] == "bfloat16"
    capsys.readouterr()
    assert cli.main(["diff", str(checkpoint), str(small)]) == 1
    out = capsys.readouterr().out
    assert "lm_head.weight: dtype float32 and bfloat16" in out and "values differ, by up to" in out
    assert cli.main(["convert", str(checkpoint), str(small)]) == 2
    assert "is not empty, it has config.json: choose" in capsys.readouterr().err
    (left := tmp_path / "left").mkdir()
    (left / ".partial-x1").mkdir()
    assert cli.main(["convert", str(checkpoint), str(left)]) == 2
    assert "it has .partial-x1 of a run that was stopped: delete it" in capsys.readouterr().err
    for size in ("nan", "inf", "0", "-1"):
        assert cli.main(["convert", str(checkpoint), str(tmp_path / "no"), "--shard-gb", size]) == 2
        assert "expected a number of GB above 0" in capsys.readouterr().err
    model = models.load(checkpoint)
    changed = model.params | {"norm": model.params["norm"].at[3].add(1e-3)}
    models.save(model._replace(params=changed), tmp_path / "other")
    assert cli.main(["diff", str(checkpoint), str(tmp_path / "other")]) == 1
    assert capsys.readouterr().out == "model.norm.weight: 1 of 32 values differ, by up to 0.001\n1 differences\n"
    assert cli.main(["diff", str(checkpoint), str(tmp_path / "other"), "--tolerance", "0.01"]) == 0


def test_quantize(checkpoint, tmp_path, capsys, caplog):
    """A calibrated file of four bits is smaller, has its tokenizer, and computes nearly the same; refusals say why."""
    out, data = tmp_path / "few", tmp_path / "data.jsonl"
    checkpoint = shutil.copytree(checkpoint, tmp_path / "plain")
    (checkpoint / "preprocessor_config.json").write_text("{}")  # of a model that sees
    data.write_text("".join(json.dumps({"text": f"hello world {i}, hello token"}) + "\n" for i in range(40)) + "[]\n")
    asked = ["quantize", str(checkpoint), str(out), "--format", "w4a16", "--group", "16"]
    assert cli.main([*asked, "--calibration", str(data), "--rows", "4", "--length", "32", "--act-order"]) == 0
    said = re.search(
        r"parameters, ([\d,]+) bytes of ([\d,]+), calibrated with 4 rows of 32 tokens\n", capsys.readouterr().out
    )
    assert "41 rows read, 40 examples" in caplog.text and f"{data}:41" in caplog.text  # what was skipped is told
    size, before = (int(n.replace(",", "")) for n in said.groups())
    assert size < before and before == 4 * SIZE and (out / "tokenizer.json").exists()
    assert (out / "preprocessor_config.json").exists()
    a, b = (models.load(path) for path in (checkpoint, out))
    assert isinstance(b.params["layers"]["q"], Quantized)
    near = params.dequantize(b.params)["layers"]["q"] - a.params["layers"]["q"]
    assert 0 < float(jnp.linalg.norm(near)) < 0.15 * float(jnp.linalg.norm(a.params["layers"]["q"]))
    assert cli.main(asked) == 2 and "is not empty" in capsys.readouterr().err
    refused = [
        (["--format", "fp8", "--calibration", str(data)], "nothing to calibrate"),
        (["--act-order"], "give calibr"),
        (["--rows", "4"], "--rows: of calibration data; give --calibration"),
    ]
    for more, why in refused:
        assert cli.main(["quantize", str(checkpoint), str(tmp_path / "no"), *more]) == 2
        assert why in capsys.readouterr().err


def test_other_dtypes_are_equal_within_a_tolerance(checkpoint, tmp_path, capsys):
    half = tmp_path / "bf16"
    assert cli.main(["convert", str(checkpoint), str(half), "--dtype", "bfloat16"]) == 0
    capsys.readouterr()
    assert cli.main(["diff", str(checkpoint), str(half), "--tolerance", "0.01"]) == 0
    assert capsys.readouterr().out == "equal\n"
    assert cli.main(["diff", str(checkpoint), str(half), "--tolerance", "1e-6"]) == 1
    out = capsys.readouterr().out
    assert "values differ" in out and "dtype" not in out


def streamed(checkpoint, file, dtype=np.float32):
    """Write a checkpoint as EasyLM streams it; rotary pairs are then neighbours, as a rotation in numpy shows."""
    msgpack = pytest.importorskip("msgpack", reason="needs the train extra")
    layer = {"self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
             "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3", "self_attn.q_proj": "attention.wq",
             "self_attn.k_proj": "attention.wk", "input_layernorm": "attention_norm",
             "post_attention_layernorm": "ffn_norm"}  # fmt: skip
    top = {"model.embed_tokens": "transformer.wte.embedding", "model.norm": "transformer.ln_f.kernel",
           "lm_head": "lm_head.kernel"}  # fmt: skip
    half = CFG.head_dim // 2
    with file.open("wb") as f:
        for name, tensor in params.tensors(checkpoint).items():
            x, name = np.asarray(tensor.read()), name.removesuffix(".weight")
            if name in top:
                key, x = top[name], x.T if name == "lm_head" else x
            else:
                _, _, i, part = name.split(".", 3)
                key = f"transformer.h.{i}.{layer[part]}.kernel"
                if part in ("self_attn.q_proj", "self_attn.k_proj"):
                    heads = x.reshape(-1, CFG.head_dim, CFG.embed)
                    pairs = np.stack([heads[:, :half], heads[:, half:]], 2).reshape(
                        x.shape
                    )  # 2i and 2i + 1 rotate together
                    h, angle = np.random.default_rng(0).normal(size=CFG.embed), 5 * 1e4 ** (-np.arange(half) / half)
                    a, b = np.split(heads @ h, 2, 1)
                    halves = np.concatenate(
                        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], 1
                    )
                    turned = (pairs @ h).reshape(-1, half, 2) @ [1, 1j] * np.exp(1j * angle)
                    np.testing.assert_allclose(np.concatenate([turned.real, turned.imag], 1), halves, atol=1e-6)
                    x = pairs
                x = x.T
            x = np.ascontiguousarray(x.astype(dtype))
            array = msgpack.ExtType(1, msgpack.packb((x.shape, x.dtype.name, x.tobytes())))
            f.write(msgpack.packb((("params", *key.split(".")), msgpack.packb(array))))


def test_streams_of_easylm_are_converted(checkpoint, tmp_path, capsys):
    streamed(checkpoint, tmp_path / "streaming_params")
    asked = ["convert", str(tmp_path / "streaming_params"), str(tmp_path / "out"), "--from", "easylm"]
    assert cli.main(asked) == 2 and "--config is missing" in capsys.readouterr().err
    assert cli.main([*asked, "--config", str(checkpoint / "config.json")]) == 0
    assert f"{SIZE:,} parameters" in capsys.readouterr().out
    assert cli.main(["diff", str(checkpoint), str(tmp_path / "out")]) == 0
    assert models.load(tmp_path / "out").cfg.kv_heads == CFG.kv_heads
    streamed(checkpoint, tmp_path / "half", jnp.bfloat16)
    asked[1:3] = [str(tmp_path / "half"), str(tmp_path / "out2")]
    assert cli.main([*asked, "--config", str(checkpoint)]) == 0
    assert params.tensors(tmp_path / "out2")["lm_head.weight"].dtype == jnp.bfloat16
    (tmp_path / "bad").write_bytes(b"\x93abc")
    assert (
        cli.main(
            ["convert", str(tmp_path / "bad"), str(tmp_path / "x"), "--from", "easylm", "--config", str(checkpoint)]
        )
        == 2
    )
    assert "is no streaming checkpoint" in capsys.readouterr().err


@pytest.mark.slow
def test_generate_streams_what_generate_returns(checkpoint, capsys):
    assert cli.main(["generate", str(checkpoint), "hello", "--max-tokens", "12", "--ignore-eos"]) == 0
    out, err = capsys.readouterr()
    model, tok = models.load(checkpoint), text.load(checkpoint)
    want = serve.generate(model, [text.encode(tok, "hello")], max_tokens=12, ignore_eos=True)[0].tokens
    assert out == "hello" + text.decode(tok, want) + "\n"
    assert "12 tokens, " in err


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["info", "/nowhere/at/all"], "/nowhere/at/all"),
        (["generate", "CHECKPOINT", "x", "--top-p", "7"], "top_p"),
        (["generate", "CHECKPOINT", "x", "--chat"], "chat template"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(checkpoint, tmp_path, capsys, arguments, message):
    places = {"CHECKPOINT": str(checkpoint), "OUT": str(tmp_path / "out")}
    assert cli.main([places.get(a, a) for a in arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"fdel {arguments[0]}: ") and message in err and err.count("\n") == 1


def test_a_setting_of_the_server_is_declared_once():
    """A field with a flag is an option of `fdel serve`; its meaning stands in the docstring, in --help and in run files."""
    parser = cli.parser("serve")
    options = {a.dest: a for a in parser._subparsers._group_actions[0].choices["serve"]._actions}
    for cls in (launch.ServerOptions, serve.Settings):
        for f in dataclasses.fields(cls):
            if f.metadata:
                assert f"{f.name}: {f.metadata['doc']}" in cls.__doc__
                assert (f.name in options) == (f.metadata["flag"] is not None)
            if f.name in options and f.default not in (None, dataclasses.MISSING, ()):
                assert options[f.name].default == f.default
    args = cli.parser("serve").parse_args(["serve", "a", "b", "--adapter", "x=y=z", "--rows", "3", "--programs", "/p"])
    found = cli.options.chosen(launch.ServerOptions, args, settings=cli.options.chosen(serve.Settings, args))
    assert (found.adapters, found.settings.rows, str(found.programs), args.models) == (
        {"x": "y=z"},
        3,
        "/p",
        ["a", "b"],
    )
    assert cli.options.chosen(serve.Settings, cli.parser("serve").parse_args(["serve", "a"])) == serve.Settings()
    key = {f.name: f for f in dataclasses.fields(schema.Esurge)}["max_num_seqs"]
    rows = {f.name: f for f in dataclasses.fields(serve.Settings)}["rows"]
    assert key.metadata["setting"] == "rows" and key.metadata["doc"] == rows.metadata["doc"] and key.default == 256


@pytest.mark.parametrize(("given", "said"), [
    (["--kernel", "attend"], "argument --kernel: found 'attend', expected OPERATION=NAME"),
    (["--adapter", "x"], "argument --adapter: found 'x', expected NAME=DIR"),
    (["--kernel", "attend=flash", "--kernel", "attend=dense"], "attend stands twice, as flash and as dense; remove one"),
])  # fmt: skip
def test_a_name_without_a_value_or_with_two_is_refused(given, said, capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(["serve", "model", *given])
    assert e.value.code == 2 and said in capsys.readouterr().err


def test_an_unknown_dtype_is_refused_with_the_known_ones(checkpoint, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(["convert", str(checkpoint), str(tmp_path / "out"), "--dtype", "float99"])
    assert e.value.code == 2 and "'float99' is unknown; use one of float32, bfloat16" in capsys.readouterr().err


def test_eval_takes_every_format():
    assert cli.options.BITS[-1]["choices"] == tuple(FORMATS)


def test_help_of_every_command(capsys):
    for command in "demo generate info convert quantize diff run plan bench serve keys plot monitor".split():
        with pytest.raises(SystemExit) as e:
            cli.main([command, "--help"])
        assert e.value.code == 0 and getattr(cli, command).__doc__[:30] in capsys.readouterr().out


@pytest.mark.slow
def test_demo_learns_saves_and_speaks(tmp_path, capsys):
    out = tmp_path / "demo"
    assert cli.main(["demo", "--out", str(out), "--steps", "12", "--seconds", "120", "--max-tokens", "5"]) == 0
    losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 12 and losses[0] > 7 and losses[-1] < losses[0] - 0.5
    points = ET.parse(out / "loss.svg").getroot()[-1].attrib["points"].split()
    assert len(points) == 12
    shown = capsys.readouterr()
    assert "The following" in shown.out and "tokens/s after the first" in shown.err
    assert "OpenAI's client, from http://127.0.0.1:" in shown.out and "playground: http://127.0.0.1:" in shown.out
    model = models.load(out)
    assert params.count(model.params) == params.count(llama.spec(model.cfg))
    assert np.isfinite(np.asarray(llama.forward(model.params, jnp.arange(4)[None], model.cfg)[0])).all()


@pytest.mark.slow
def test_bench_measures_a_checkpoint(checkpoint, capsys):
    assert cli.main(["bench", str(checkpoint)]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["load", "prefill 512", "decode batch 1", "decode batch 8", "train step 4x512"]
    assert [line.split(":")[0] for line in lines] == names
    assert all(float(re.search(r": ([\d,.]+) ", line)[1].replace(",", "")) >= 0 for line in lines)


@pytest.mark.parametrize("first", [0.5, 2.0, 3.0])
def test_a_busy_machine_decodes_no_negative_tokens(first, monkeypatch):
    """The call of one token may take as long as that of 65, and longer."""
    spent = iter([2.0, first])
    monkeypatch.setattr(bench, "seconds", lambda *_: next(spent))
    monkeypatch.setattr(bench, "prompts", lambda *_: [])
    assert bench.decode(None, 3) == 3 * 64 / (1.5 if first < 2 else 2.0)


def test_keys_are_made_listed_and_removed(tmp_path, capsys):
    file = str(tmp_path / "keys.json")
    said = lambda *args: (cli.main(["keys", file, *args]), capsys.readouterr())
    code, shown = said("add", "bot", "--role", "service", "--requests-per-minute", "5")
    secret = shown.out.strip()
    (key,) = keyfile.load(file).values()
    assert code == 0 and auth.authenticate(keyfile.load(file), f"Bearer {secret}") == key
    assert (key.name, key.role, key.requests_per_minute) == ("bot", "service", 5)
    code, shown = said("list")
    assert shown.out.split() == [key.id, "service", "bot"] and secret not in shown.out
    assert said("remove", "nobody")[0] == 2 and said("add", "x", "--role", "root")[0] == 2
    assert said("remove", key.id)[0] == 0 and keyfile.load(file) == {}


def test_serving_beyond_this_machine_needs_keys(checkpoint, capsys):
    assert cli.main(["serve", str(checkpoint), "--host", "0.0.0.0"]) == 2
    assert "give --api-key-file" in capsys.readouterr().err
    assert cli.main(["serve", str(checkpoint), "--tool-parser", "hermess"]) == 2
    assert "use one of hermes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("tp=16", "mesh {'tp': 16} needs a multiple of 16 devices, found 8"),
        ("tp=3", "'heads' of size 4 is not divisible by tp=3"),
        ("dp=2,tp=2", "every device of dp=2 would compute the same"),
        ("tp", "cannot read 'tp'"),
    ],
)
def test_meshes_that_do_not_fit(checkpoint, capsys, mesh, message):
    for command in (["serve"], ["generate", "x"], ["bench"]):
        assert cli.main([command[0], str(checkpoint), *command[1:], "--mesh", mesh]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_mesh_writes_what_one_device_writes(checkpoint, capsys):
    asked = ["generate", str(checkpoint), "hello", "--max-tokens", "12", "--ignore-eos"]
    said = [(cli.main(asked + mesh), capsys.readouterr().out) for mesh in ([], ["--mesh", "tp=2"], ["--mesh", "tp=4"])]
    assert said[0][0] == 0 and said[0] == said[1] == said[2]
    assert cli.main(["bench", str(checkpoint), "--mesh", "tp=2"]) == 0
    out = capsys.readouterr().out
    assert "on 2 x cpu" in out and "train step" in out


@pytest.mark.slow
@pytest.mark.matrix
def test_attention_is_timed_alone(checkpoint, capsys):
    assert cli.main(["bench", str(checkpoint), "--attention", "64,1088", "--dtype", "float32"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 * len(ATTEND.implementations) and sum("with gradients" in r for r in rows) == 3 + 2
    assert any(r.startswith("short     float32   7 x 1088: ") and "gradients" not in r for r in rows)


@contextlib.contextmanager
def serving(checkpoint, *more: str, **env: str):
    """A server of two rows as its own process, and its address."""
    command = [sys.executable, "-m", "fdel", "serve", str(checkpoint), "--port", "0", "--name", "tiny"]
    command += ["--rows", "2", "--max-length", "128", *more]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | env)
    try:
        yield server, next(found[1] for line in server.stderr if (found := re.search(r"(http://\S+)/v1", line)))
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_a_server_on_a_mesh_answers_as_on_one_device(checkpoint, capsys):
    """Over HTTP, with weights and cache on two virtual devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    said = []
    for more in ([], ["--mesh", "tp=2"]):
        with serving(checkpoint, *more, XLA_FLAGS=flags, JAX_PLATFORMS="cpu") as (_, address):
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 40, "ignore_eos": True, "temperature": 0}
            kind = {"Content-Type": "application/json"}
            asked = urllib.request.Request(address + "/v1/completions", json.dumps(body).encode(), kind)
            with urllib.request.urlopen(asked) as answer:
                said.append(json.load(answer)["choices"][0]["text"])
    assert said[0] == said[1] != ""


@pytest.mark.slow
def test_a_server_ends_when_it_is_told_to(checkpoint):
    """It answers while it runs, finishes what is under way after SIGTERM, and exits with 0."""
    with serving(checkpoint) as (server, address):
        with urllib.request.urlopen(address + "/v1/models") as answer:
            assert json.load(answer)["data"][0]["id"] == "tiny"
        body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 100, "ignore_eos": True, "stream": True})
        asked = urllib.request.Request(address + "/v1/completions", body.encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as stream:
            first = stream.readline()
            server.send_signal(signal.SIGTERM)
            rest = stream.read()
        assert first.startswith(b"data: {") and rest.endswith(b"data: [DONE]\n\n")
        assert server.wait(60) == 0


def test_closed_streams_leave_their_numbers_to_no_file(tmp_path):
    """As a daemon may be started: else what a library writes to standard error lies in the first file that was opened."""
    code = (
        "import os, sys; from fdel import cli\n"
        "cli.main(['keys', 'none.json', 'list'])\n"
        "file = open('first', 'w'); print('lost', file=sys.stderr); os.write(2, b'lost'); os.system('echo lost >&2')\n"
        "file.write(str(file.fileno()))"
    )
    command = f'exec {sys.executable} -c "{code}" 0<&- 1>&- 2>&-'
    where = os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(cli.__file__))}
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path, env=where, check=False).returncode == 0
    assert int((tmp_path / "first").read_text()) > 2
