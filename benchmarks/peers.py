"""Other servers of the same checkpoint: how each is started, and its format of weights. Used by serve.py and engine.py.

A peer is used if one of the Python interpreters that the benchmark is told of has its module, or is its program.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from model import CONFIG


@dataclass(frozen=True)
class Peer:
    """A server with OpenAI's /v1/completions.

    module: what its interpreter must have, or its program's name. command: what follows the interpreter or program.
    asked: what a request's body has besides the prompt. gguf: the type of the weights that it needs in llama.cpp's
    format, as `convert` writes them.
    """

    module: str
    command: str
    asked: dict[str, Any] = field(default_factory=dict)
    gguf: str | None = None


_TRANSFORMERS = "-m transformers.cli.transformers serve {dir} --port {port} --device cpu --dtype float32"
_LLAMA = "-m {dir}/%s.gguf --port {port} -c 16384 -np 32 --alias {dir}"  # 32 sequences of 512 tokens
PEERS = {
    "fdel": Peer("fdel", "-m fdel serve {dir} --name {dir} --port {port}", {"ignore_eos": True}),
    "transformers serve": Peer("uvicorn", _TRANSFORMERS),
    "transformers serve, continuous batching": Peer("uvicorn", _TRANSFORMERS + " --continuous-batching"),
    "llama.cpp, f32": Peer("llama-server", _LLAMA % "f32", {"ignore_eos": True}, gguf="f32"),
    "llama.cpp, q8_0": Peer("llama-server", _LLAMA % "q8_0", {"ignore_eos": True}, gguf="q8_0"),
    "vLLM": Peer(
        "vllm",
        "-m vllm.entrypoints.openai.api_server --model {dir} --port {port} --dtype float32 --max-num-seqs 32",
        {"ignore_eos": True},
    ),
}


def has(program: str, module: str) -> bool:
    """Say whether a Python interpreter has a module, or a program is it."""
    command = [program, "-c", f"import {module}"]
    runs = Path(program).name.startswith("python") and not subprocess.run(command, capture_output=True).returncode
    return runs or Path(program).name == module


def found(names: Sequence[str], programs: Sequence[str]) -> dict[str, str]:
    """Say which interpreter or program runs each peer, of those that can be run."""
    first = {n: next((p for p in programs if has(p, PEERS[n].module)), None) for n in names}
    return {name: program for name, program in first.items() if program}


def get(port: int, path: str, key: str = "") -> bytes:
    """Read a page of a server, with an API key if there is one."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return urllib.request.urlopen(
        urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers), timeout=5
    ).read()


def answers(port: int) -> bool:
    """Say whether a server answers: transformers' has no models to list where nothing was ever downloaded, llama.cpp's
    says 503 while it loads."""
    try:
        get(port, "/v1/models")
    except urllib.error.HTTPError as e:
        return e.code != 503
    except OSError:
        return False
    return True


@contextlib.contextmanager
def running(name: str, python: str, directory: str) -> Iterator[tuple[int, int, float]]:
    """Run a server: (port, process id, seconds until it answered)."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [python, *PEERS[name].command.format(dir=directory, port=port).split()]
    begin = time.perf_counter()
    with open(Path(directory) / "server.log", "w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while True:
                if answers(port):
                    break
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(f"{name} ended with {process.returncode}:\n{log.read()[-2000:]}")
                time.sleep(0.1)
            yield port, process.pid, time.perf_counter() - begin
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


# ---- the checkpoint ------------------------------------------------------------------------------------------------


def checkpoint(directory: str, scale: float) -> None:
    """Save a random Llama without an eos token, and a tokenizer that has a text for each of its ids."""
    import jax

    from fdel import models, params, text
    from fdel.models import llama

    sizes = {k: max(1, int(CONFIG[k] * scale)) for k in ("num_hidden_layers", "intermediate_size", "vocab_size")}
    sizes = {k: -(-v // 32) * 32 if v > 12 else v for k, v in sizes.items()}  # whole blocks of q8_0
    heads = max(1, int(CONFIG["num_key_value_heads"] * scale))
    sizes |= {"hidden_size": 192 * heads, "num_attention_heads": 3 * heads, "num_key_value_heads": heads}
    cfg = llama.Config.from_hf(CONFIG | sizes)
    models.save(models.Model(llama, cfg, params.init(llama.spec(cfg), jax.random.key(0))), directory)
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ("".join(rng.choice(letters, n)) for n in rng.integers(2, 9, max(200, 2 * sizes["vocab_size"])))
    text.save(text.train_bpe([" ".join(words)], sizes["vocab_size"]), directory)
    for name in ("config.json", "generation_config.json"):
        path = Path(directory) / name
        if path.exists():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None, "bos_token_id": None}))


_NAMES = (
    (r"model\.embed_tokens", "token_embd"),
    (r"model\.norm", "output_norm"),
    (r"lm_head", "output"),
    (r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj", r"blk.\1.attn_\2"),
    (r"model\.layers\.(\d+)\.self_attn\.o_proj", r"blk.\1.attn_output"),
    (r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj", r"blk.\1.ffn_\2"),
    (r"model\.layers\.(\d+)\.input_layernorm", r"blk.\1.attn_norm"),
    (r"model\.layers\.(\d+)\.post_attention_layernorm", r"blk.\1.ffn_norm"),
)


def convert(directory: str, kind: str) -> str:
    """Write a Llama's checkpoint in llama.cpp's format, matrices as "f32" or "q8_0"; its rope pairs neighbours."""
    import gguf
    from safetensors.numpy import load_file

    out = f"{directory}/{kind}.gguf"
    if os.path.exists(out):
        return out
    c = json.loads((Path(directory) / "config.json").read_text())
    tok = json.loads((Path(directory) / "tokenizer.json").read_text())
    w = gguf.GGUFWriter(out, "llama")
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_block_count(c["num_hidden_layers"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_freq_base(c.get("rope_theta") or c["rope_parameters"]["rope_theta"])
    w.add_vocab_size(c["vocab_size"])
    tokens = {i: t for t, i in tok["model"]["vocab"].items()}
    every = [tokens.get(i, f"<unused{i}>") for i in range(c["vocab_size"])]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(every)
    w.add_token_types([gguf.TokenType.NORMAL if i else gguf.TokenType.CONTROL for i in range(len(every))])
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tok["model"]["merges"]])
    w.add_eos_token_id(0)
    w.add_add_bos_token(False)
    heads = {"q": c["num_attention_heads"], "k": c["num_key_value_heads"]}
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, x in load_file(Path(directory) / "model.safetensors").items():
        new = name.removesuffix(".weight")
        for old, to in _NAMES:
            new = re.sub(f"^{old}$", to, new)
        if n := heads.get(new[-1] if ".attn_" in new else ""):
            x = x.reshape(n, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
        x = x.astype(np.float32)
        if kind == "q8_0" and x.ndim == 2:
            w.add_tensor(f"{new}.weight", gguf.quants.quantize(x, q8), raw_dtype=q8)
        else:
            w.add_tensor(f"{new}.weight", x)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return out


if __name__ == "__main__":
    print("\n".join(found(list(PEERS), [sys.executable])))
