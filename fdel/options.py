"""The options of the command line's larger commands."""

import argparse
from pathlib import Path

DTYPES = ("float32", "bfloat16", "float16", "float64")


def dtype(name: str) -> str:
    """Check the name of a floating dtype."""
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"{name!r} is unknown; use one of {', '.join(DTYPES)}")
    return name


def mesh(p: argparse.ArgumentParser) -> None:
    """Add `--mesh`, of the commands that serve."""
    p.add_argument("--mesh", help="devices to divide weights and cache over, such as tp=4 (default: one device)")


def generate(p: argparse.ArgumentParser, dtype: dict) -> None:
    """Add the options of `fdel generate`."""
    p.add_argument("--chat", action="store_true", help="send the prompt as a user message through the chat template")
    p.add_argument("--max-tokens", type=int, default=128, help="tokens to write at the most (default: %(default)s)")
    p.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: %(default)s)")
    p.add_argument(
        "--top-k", type=int, default=0, help="draw from the k likeliest tokens; 0: all (default: %(default)s)"
    )
    p.add_argument(
        "--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this mass (default: all)"
    )
    p.add_argument(
        "--min-p", type=float, default=0.0, help="drop tokens below this share of the likeliest (default: none)"
    )
    p.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="divide repeated tokens' logits (default: off)"
    )
    p.add_argument("--seed", type=int, default=None, help="seed of the draws (default: a new one)")
    p.add_argument("--stop", action="append", default=[], help="end before this text (may be given several times)")
    p.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    p.add_argument("--dtype", **dtype)
    mesh(p)


def monitor(p: argparse.ArgumentParser) -> None:
    """Add the options of `fdel monitor`."""
    p.add_argument("address", nargs="?", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    p.add_argument("--key-file", type=Path, help="a file that holds the secret of a key that may read metrics")
    p.add_argument("--every", type=float, default=1.0, help="seconds between two lines (default: %(default)s)")
    p.add_argument("--grafana", action="store_true", help="print a dashboard that Grafana imports")


def run(p: argparse.ArgumentParser) -> None:
    """Add the options of `fdel run`."""
    p.add_argument("recipe", nargs="?", help="the run file, YAML or JSON")
    p.add_argument("--config", help="the same")
    p.add_argument("--dry-run", action="store_true", help="print the whole configuration, check it, and do nothing")
    p.add_argument("--devices", type=int, help="with --dry-run: devices there will be (default: those of this machine)")
    p.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key, as trainer.learning_rate=2e-5"
    )
    p.add_argument("--keys", action="store_true", help="print every key of a run file with its meaning")


def bench(p: argparse.ArgumentParser, dtype: dict) -> None:
    """Add the options of `fdel bench`."""
    p.add_argument("--dtype", **dtype)
    mesh(p)
    p.add_argument("--no-train", action="store_true", help="leave out the training step")
    lengths = lambda text: [int(n) for n in text.split(",")]
    p.add_argument("--attention", type=lengths, metavar="N,N", help="time attention alone, in rows of so many tokens")


def convert(p: argparse.ArgumentParser, dtype: dict) -> None:
    """Add the options of `fdel convert`."""
    p.add_argument("--dtype", **dtype)
    p.add_argument("--shard-gb", type=float, default=5.0, help="most GB of a file (default: %(default)s)")
    p.add_argument(
        "--from", dest="format", choices=("hf", "easylm"), default="hf", help="format (default: %(default)s)"
    )
    p.add_argument(
        "--config", type=Path, help="with --from easylm: a config.json of the model's size, or its directory"
    )


def plan(p: argparse.ArgumentParser) -> None:
    """Add the options of `fdel plan`."""
    p.add_argument("--devices", type=int, required=True, help="number of devices")
    p.add_argument(
        "--mesh", default="fsdp=-1", help="sizes of the mesh axes, such as fsdp=64,tp=4 (default: %(default)s)"
    )
    p.add_argument("--rows", type=int, help="rows of a step's batch, on all devices together")
    p.add_argument("--length", type=int, default=4096, help="tokens per row (default: %(default)s)")
    p.add_argument("--microbatches", type=int, default=1, help="parts of the batch, in turn (default: %(default)s)")
    p.add_argument("--dtype", type=dtype, default="bfloat16", help="of the parameters (default: %(default)s)")
    p.add_argument("--optimizer", default="adamw", help="by name (default: %(default)s)")
    p.add_argument("--remat", help="what the backward pass computes again, such as nothing_saveable (default: nothing)")
    p.add_argument("--memory", type=float, help="GiB of a device, to say whether the step fits")


def serve(p: argparse.ArgumentParser, dtype: dict) -> None:
    """Add the options of `fdel serve`."""
    p.add_argument("models", nargs="+", metavar="DIR", help="checkpoint directories in Hugging Face layout, or Hub ids")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    p.add_argument("--port", type=int, default=8000, help="(default: %(default)s; 0: a free one)")
    p.add_argument(
        "--name", dest="names", action="append", default=[], help="a model's name (default: its directory's)"
    )
    p.add_argument("--api-key-file", dest="key_file", type=Path, help="keys that may ask; see `fdel keys`")
    p.add_argument(
        "--audit-log", dest="audit", type=Path, help="append a line of JSON for every call to this file (mode 0600)"
    )
    p.add_argument(
        "--insecure", action="store_true", help="listen beyond this machine, and answer to any name, without keys"
    )
    p.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=DIR", help="a PEFT adapter of the first model"
    )
    p.add_argument("--adapter-root", type=Path, help="directory below which admins may load adapters (default: none)")
    p.add_argument("--dtype", **dtype)
    mesh(p)
    p.add_argument("--quantize", choices=("int8", "fp8", "nf4"), help="keep the layers' matrices in few bits")
    p.add_argument("--max-loras", type=int, default=0, help="adapters to make room for at the start (default: none)")
    p.add_argument("--max-lora-rank", type=int, help="greatest rank of adapters (default: 64, but 16 for the room)")
    p.add_argument("--kv-cache-dtype", choices=("int8", "fp8"), help="keep keys and values in 8 bits")
    p.add_argument("--tool-parser", help="how the models write calls of tools (default: by their chat template)")
    p.add_argument("--rows", type=int, default=32, help="sequences that run at a time (default: %(default)s)")
    p.add_argument("--pages", type=int, help="pages of 64 tokens for keys and values (default: 1024 tokens a row)")
    p.add_argument("--max-length", type=int, help="tokens of prompt and answer (default: the model's context)")
    p.add_argument(
        "--truncate",
        choices=("left", "right", "middle"),
        help="where too long prompts are cut (default: they are refused)",
    )
    p.add_argument("--budget", type=int, default=512, help="prompt tokens of one step (default: %(default)s)")
    p.add_argument(
        "--chunk", type=int, help="the same beside at most 8 sequences that decode (default: 128 on CPU, else --budget)"
    )
    p.add_argument(
        "--queue", type=int, default=1024, help="requests that may wait, of one key at most half (default: %(default)s)"
    )
    p.add_argument(
        "--draft", metavar="DIR", help="a smaller model of the same tokens, which guesses --drafts ahead, or 3"
    )
    p.add_argument("--drafts", type=int, default=0, help="tokens guessed ahead from what was said (default: none)")
    p.add_argument("--decode-steps", type=int, default=1, help="tokens of a call while no prompt waits (%(default)s)")
    p.add_argument(
        "--programs",
        type=Path,
        default=argparse.SUPPRESS,
        help="where compiled programs are kept (default: ~/.cache/fdel)",
    )
    p.add_argument("--grace", type=float, default=30.0, help="seconds to finish answers in at the end (%(default)s)")


def eval(p: argparse.ArgumentParser, dtype: dict) -> None:
    """Add the options of `fdel eval`."""
    p.add_argument("--tasks", type=lambda names: names.split(","), required=True, help="names or patterns, as a,b")
    p.add_argument("--include-path", type=Path, metavar="DIR", help="directory with tasks of your own (YAML)")
    p.add_argument("--num-fewshot", type=int, metavar="K", help="examples in the prompt (default: the task's)")
    p.add_argument("--limit", type=float, metavar="N", help="examples of each task, below 1 a share (default: all)")
    p.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON to a new file")
    p.add_argument("--apply-chat-template", action="store_true", help="send prompts through the chat template")
    p.add_argument("--system-instruction", metavar="TEXT", help="system message")
    p.add_argument("--max-new-tokens", type=int, metavar="N", help="of an answer (default: the task's)")
    p.add_argument("--temperature", type=float, help="0 takes the likeliest token (default: the task's)")
    p.add_argument("--top-p", type=float, help="draw from the likeliest tokens of this mass (default: the task's)")
    p.add_argument("--batch", type=int, default=32, help="sequences at a time (default: %(default)s)")
    p.add_argument("--max-length", type=int, help="tokens that the model reads (default: its context)")
    p.add_argument("--quantize", choices=("int8", "fp8", "nf4"), help="keep the layers' matrices in few bits")
    p.add_argument("--dtype", **dtype)
    mesh(p)


def keys(p: argparse.ArgumentParser) -> None:
    """Add the options of `fdel keys`."""
    p.add_argument("do", choices=("add", "list", "remove"))
    p.add_argument("name", nargs="?", default="", help="a new key's name, or the id of the one to remove")
    p.add_argument("--role", default="user", help="admin, service, user or readonly (default: %(default)s)")
    p.add_argument("--requests-per-minute", type=float, help="(default: no limit)")
    p.add_argument("--tokens-per-minute", type=float, help="(default: no limit)")
