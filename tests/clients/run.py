"""Run clients that others wrote against a server: `python tests/clients/run.py [--keep DIR] [NAME ...]`.

Each client gets an environment of its own from pip or npm, because together they do not agree on versions, and does what
its users do: chat, stream, tools, structured output, usage, errors. The server is `fdel serve` with a tiny random model.
"""

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import jax

from fdel import models, params, text
from fdel.models import llama
from fdel.serve.server import auth, keyfile

HERE = Path(__file__).parent
MODEL = "tiny"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}<tool_call>{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# name -> (what is installed, the script). Versions are those that were last seen to work; litellm imports mcp unasked.
CLIENTS = {
    "openai": ("openai==3.54.0", "with_openai.py"),
    "langchain": ("langchain-openai==1.7.3", "with_langchain.py"),
    "instructor": ("instructor==1.17.0", "with_instructor.py"),
    "litellm": ("litellm==1.106.2 mcp", "with_litellm.py"),
    "npm": ("openai@7.55.0", "with_npm.mjs"),
}


def make(path: Path) -> tuple[Path, Path, str]:
    """Write a tiny model and a key file: their places, and the key's secret."""
    tok = text.train_bpe(["how is the weather in Paris", "rain in Rome"] * 2, 300, ["<|im_start|>", "<|im_end|>"])
    made = text.Tokenizer(
        tok.backend, {"eos_token": "<|im_end|>"}, (tok.backend.token_to_id("<|im_end|>"),), {"default": TEMPLATE},
        {"eos_token": "<|im_end|>"}, tok.json,
    )  # fmt: skip
    config = dict(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=made.eos_ids[0],
    )  # fmt: skip
    cfg = llama.Config.from_hf(config)
    weights = jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x, params.init(llama.spec(cfg), jax.random.key(0)))
    models.save(models.Model(llama, cfg, weights), path / MODEL)
    text.save(made, path / MODEL)
    key, secret = auth.create("clients", "user", 0.0)
    keyfile.save(path / "keys.json", [key])
    return path / MODEL, path / "keys.json", secret


@contextlib.contextmanager
def server(path: Path) -> Iterator[tuple[str, str]]:
    """Run `fdel serve` on a free port: its address and a key."""
    model, keys, secret = make(path)
    command = [sys.executable, "-m", "fdel", "serve", str(model), "--port", "0", "--api-key-file", str(keys)]
    sizes = ["--rows", "4", "--budget", "128", "--programs", str(path / "programs")]
    running = subprocess.Popen([*command, *sizes], stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    try:
        for line in running.stderr or ():
            said.append(line)
            if found := re.search(r"at (http://\S+/v1)", line):
                break
        else:
            raise RuntimeError("the server did not start:\n" + "".join(said))
        threading.Thread(target=lambda: [None for _ in running.stderr or ()], daemon=True).start()  # keep it flowing
        yield found[1], secret
    finally:
        running.terminate()
        running.wait(60)


def install(name: str, path: Path) -> list[str]:
    """Make a client's environment, unless it is there: the command that runs a script in it."""
    package, _ = CLIENTS[name]
    here = path / name
    if name == "npm":
        here.mkdir(parents=True, exist_ok=True)
        if not (here / "node_modules").exists():
            subprocess.run(["npm", "install", "--silent", "--prefix", str(here), package], check=True)
        return ["node"]
    python = here / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(here)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *package.split()], check=True)
    return [str(python)]


def check(name: str, command: list[str], url: str, key: str, path: Path) -> subprocess.CompletedProcess:
    """Run one client's script."""
    script = str(HERE / CLIENTS[name][1])
    return subprocess.run([*command, script, url, key, MODEL], cwd=path, capture_output=True, text=True, timeout=300)


def main() -> int:
    """Run the clients that are named, or all; 1 if one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(CLIENTS)} (default: all)")
    parser.add_argument("--keep", type=Path, help="directory in which the environments stay for the next time")
    args = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as scratch, server(Path(scratch)) as (url, key):
        for name in args.names or CLIENTS:
            root = (args.keep or Path(scratch)).resolve()
            command = install(name, root)
            done = check(name, command, url, key, root / name)
            failed += [name] if done.returncode else []
            print(f"{name}: {'FAILED' if done.returncode else done.stdout.strip().splitlines()[-1]}", flush=True)
            if done.returncode:
                print(done.stdout + done.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
