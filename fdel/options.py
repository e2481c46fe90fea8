"""The options of the command line, a row each, and the flags of dataclasses that declare their fields as `setting`s."""

import argparse
import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16", "float64")


def dtype(name: str) -> str:
    """Check the name of a floating dtype."""
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"{name!r} is unknown; use one of {', '.join(DTYPES)}")
    return name


class Pair(argparse.Action):
    """Collect what an option gives that may be given several times, as NAME=DIR; no name twice."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, text: Any, option: str | None = None) -> None:
        """Read one."""
        name, equals, value = text.partition("=")
        found = getattr(namespace, self.dest)
        if not equals:
            raise argparse.ArgumentError(self, f"found {text!r}, expected {self.metavar}")
        if name in found:
            raise argparse.ArgumentError(self, f"{name} stands twice, as {found[name]} and as {value}; remove one")
        setattr(namespace, self.dest, found | {name: value})


def numbers(text: str) -> list[int]:
    """Read N,N,..."""
    return [int(n) for n in text.split(",")]


def names(text: str) -> list[str]:
    """Read NAME,NAME,..."""
    return text.split(",")


MODEL = "checkpoint directory in Hugging Face layout, or a Hub id (extra `hub`)"
CAST = ("--dtype", "cast weights to this dtype, such as float32 or bfloat16 (default: as stored)", dtype)
MESH = ("--mesh", "devices to divide weights and cache over, such as tp=4 (default: one device)")
BITS = (
    "--quantize",
    "keep the layers' matrices in few bits",
    None,
    {"choices": ("int8", "fp8", "nf4", "mxfp4", "int4", "a8q", "w4a8", "a4q")},
)
# For each command its arguments: a name, what it means, a type or a default (False: a switch; (): may be given several
# times), and what else argparse takes.
ROWS: Mapping[str, tuple[tuple, ...]] = {
    "demo": (
        ("--out", "directory for the checkpoint", Path("fdel-demo")),
        ("--prompt", "text to complete", "The following"),
        ("--steps", "training steps at the most", 300),
        ("--seconds", "training time at the most", 60.0),
        ("--max-tokens", "tokens to write", 80),
        ("--serve", "keep the server and its playground running until Ctrl-C", False),
    ),
    "generate": (
        ("model", MODEL), ("prompt", "text to continue"),
        ("--chat", "send the prompt as a user message through the chat template", False),
        ("--max-tokens", "tokens to write at the most", 128),
        ("--temperature", "0 takes the likeliest token", 0.0),
        ("--top-k", "draw from the k likeliest tokens; 0: all", 0),
        ("--top-p", "draw from the likeliest tokens of this mass (default: all)", 1.0),
        ("--min-p", "drop tokens below this share of the likeliest (default: none)", 0.0),
        ("--repetition-penalty", "divide repeated tokens' logits (default: off)", 1.0),
        ("--seed", "seed of the draws (default: a new one)", int),
        ("--stop", "end before this text (may be given several times)", ()),
        ("--ignore-eos", "go on after the end-of-text token", False), CAST, MESH,
    ),
    "info": (
        ("model", MODEL), ("--mesh", "also print the shards on a mesh, such as fsdp=2,tp=4"),
        ("--rules", "sharding rules", "train", {"choices": ("train", "serve")}),
        ("--context", "context length for FLOPs (default: the model's longest)", int),
    ),
    "convert": (
        ("source", MODEL), ("target", "new directory", Path), CAST, ("--shard-gb", "most GB of a file", 5.0),
        ("--from", "format", "hf", {"dest": "format", "choices": ("hf", "easylm")}),
        ("--config", "with --from easylm: a config.json of the model's size, or its directory", Path),
    ),
    "quantize": (
        ("source", MODEL), ("target", "new directory", Path),
        ("--format", "w8a16 (or 8bit), w8a8 (a8q), w4a16, fp8, fp8_tensor, fp8_block, gptq, gptq_8, nf4, bnb_8", "w8a16"),
        ("--group", "inputs, or sides of a block, with one scale (default: 128; 64 for nf4)", int),
        ("--calibration", "data file that the model reads; integers are then found by GPTQ", Path, {"metavar": "FILE"}),
        ("--rows", "rows of calibration data (default: 128)", int),
        ("--length", "tokens of such a row (default: 2048)", int),
        ("--smooth", "with calibration data: share of activations that weights take over, such as 0.5", float),
        ("--act-order", "GPTQ rounds inputs of large activations first", False),
        CAST, ("--shard-gb", "most GB of a file", 5.0),
    ),
    "diff": (
        ("a", MODEL), ("b", "the other one"), ("--tolerance", "accept differences up to this, and of dtype", 0.0),
    ),
    "plan": (
        ("model", "a run file, or a directory with a config.json; the options belong to that"),
        ("--devices", "number of devices of no kind", int),
        ("--target", "compile for these devices, such as v5p:4x4x4, v6e:16x16 or h100:1x4x8"),
        ("--serve", "with --target: an engine's decode and prefill in place of a training step", False),
        ("--mesh", "sizes of the mesh axes, such as fsdp=64,tp=4 (default: fsdp=-1, with --serve tp=-1)"),
        ("--rows", "rows of a step's batch, on all devices together; with --serve sequences", int),
        ("--length", "tokens per row", 4096),
        ("--microbatches", "parts of the batch, in turn", 1),
        ("--dtype", "of the parameters", "bfloat16", {"type": dtype}),
        ("--optimizer", "by name", "adamw"),
        ("--remat", "what the backward pass computes again, such as nothing_saveable (default: nothing)"),
        ("--memory", "GiB of a device, to say whether the step fits", float),
    ),
    "run": (
        ("recipe", "the run file, YAML or JSON", None, {"nargs": "?"}), ("--config", "the same"),
        ("--dry-run", "print the whole configuration, check it, and do nothing", False),
        ("--devices", "with --dry-run: devices there will be (default: those of this machine)", int),
        ("--debug", "as --set trainer.debug=true: end with the first number that cannot be right, and its path", False),
        ("--set", "change a key, as trainer.learning_rate=2e-5", (), {"metavar": "KEY=VALUE"}),
        ("--keys", "print every key of a run file with its meaning", False),
    ),
    "bench": (
        ("model", MODEL), CAST, MESH, ("--no-train", "leave out the training step", False),
        ("--attention", "time attention alone, in rows of so many tokens", numbers, {"metavar": "N,N"}),
    ),
    "serve": (
        ("models", "checkpoint directories in Hugging Face layout, or Hub ids", None, {"nargs": "+", "metavar": "DIR"}),
    ),
    "monitor": (
        ("address", "of the server (default: %(default)s)", "http://127.0.0.1:8000", {"nargs": "?"}),
        ("--key-file", "a file that holds the secret of a key that may read metrics", Path),
        ("--every", "seconds between two lines", 1.0),
        ("--grafana", "print a dashboard that Grafana imports", False),
    ),
    "eval": (
        ("model", MODEL), ("--output", "write the results as JSON to a new file", Path, {"metavar": "FILE"}),
        ("--max-length", "tokens that the model reads (default: its context)", int), BITS, CAST, MESH,
    ),
    "keys": (
        ("file", "the key file; made if it is not there", Path), ("do", None, None, {"choices": ("add", "list", "remove")}),
        ("name", "a new key's name, or the id of the one to remove", "", {"nargs": "?"}),
        ("--role", "admin, service, user or readonly", "user"),
        ("--requests-per-minute", "(default: no limit)", float), ("--tokens-per-minute", "(default: no limit)", float),
    ),
    "plot": (
        ("runs", "directory of a run, or its metrics.jsonl", Path, {"nargs": "+", "metavar": "RUN"}),
        ("--out", "name of the files; .png or .html: only that one", Path("curves")),
        ("--metric", "draw only this one (may be given several times)", ()),
    ),
}  # fmt: skip


def add(p: argparse.ArgumentParser, command: str) -> None:
    """Add the arguments of a command: its rows, and the fields of the dataclasses that declare some."""
    for row in ROWS[command]:
        _add(p, *row)
    if command == "serve":
        from fdel.serve.server.options import ServerOptions, Settings

        _declared(p, ServerOptions)
        _declared(p, Settings)
    elif command == "eval":
        from fdel.serve.server.evaluate import Options

        _declared(p, Options)


def _add(
    p: argparse.ArgumentParser, name: str, help: str | None, kind: Any = None, how: Mapping[str, Any] = {}
) -> None:
    """Add an argument; a default number or text is shown, unless the help speaks of it."""
    if kind is False:
        p.add_argument(name, action="store_true", help=help, **how)
    elif isinstance(kind, tuple):
        p.add_argument(name, action="append", default=[], help=help, **how)
    elif kind is None or callable(kind):
        p.add_argument(name, help=help, **{"type": kind} | dict(how))
    else:
        shown = f"{help}{'' if 'default' in str(help) or kind == '' else ' (default: %(default)s)'}"
        p.add_argument(name, default=kind, help=shown, **{"type": type(kind)} | dict(how))


def _declared(p: argparse.ArgumentParser, cls: type) -> None:
    """Add the flags of a dataclass whose fields are `setting`s; one without a default is required, a list of names."""
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if f.metadata.get("flag") is not None:
            name, _, metavar = (f.metadata["flag"] or "--" + f.name.replace("_", "-")).partition(" ")
            types = typing.get_args(hints[f.name])
            kind = dtype if f.name == "dtype" else next((k for k in (float, int, Path) if k in types), None)
            how: dict[str, Any] = {"dest": f.name, "metavar": metavar or None, "choices": f.metadata["choices"] or None}
            how = {k: v for k, v in how.items() if v is not None}
            if f.default_factory is dict:
                p.add_argument(name, action=Pair, default={}, help=f.metadata["doc"], **how)
            elif f.default is dataclasses.MISSING:
                _add(p, name, f.metadata["doc"], names, how | {"required": True})
            else:
                _add(p, name, f.metadata["doc"], kind if f.default is None else f.default, how)


def chosen(cls: type, args: argparse.Namespace, **others: Any) -> Any:
    """Make a dataclass of what the command line gave, and of others."""
    given = {f: getattr(args, f.name) for f in dataclasses.fields(cls) if hasattr(args, f.name)}
    return cls(**{f.name: v for f, v in given.items()}, **others)
