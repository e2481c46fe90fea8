"""The command line: `fdel COMMAND --help` describes each command. Exit codes: 0 done, 1 differences, 2 an error."""

import argparse
import contextlib
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import fdel

# Files beside the weights that make a checkpoint usable.
COMPANIONS = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "generation_config.json", "*.jinja")
DTYPES = ("float32", "bfloat16", "float16", "float64")


def demo(args: argparse.Namespace) -> int:
    """Train a small Llama on real text, save it, load it back and let it complete a sentence."""
    from fdel import demo

    demo.main(args.out, args.prompt, args.steps, args.seconds, args.max_tokens)
    return 0


def generate(args: argparse.Namespace) -> int:
    """Continue a prompt with a checkpoint and stream the text."""
    from fdel import demo, models, params, text

    directory = params.resolve(args.model)
    tok = text.load(directory)
    prompt: str | list[int] = args.prompt
    if args.chat:
        rendered = text.render_chat(tok, [{"role": "user", "content": args.prompt}], add_generation_prompt=True)
        prompt = text.encode(tok, rendered, special=False)
    model = models.load(directory, dtype=args.dtype, stacked=False)
    if not args.chat:
        print(args.prompt, end="", flush=True)
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos")
    demo.speak(model, tok, prompt, **{name: getattr(args, name) for name in names})
    return 0


def info(args: argparse.Namespace) -> int:
    """Describe a checkpoint: parameters, bytes per dtype, FLOPs and cache bytes per token, shards on a mesh."""
    from fdel import params, report

    print(report.info(params.resolve(args.model), mesh=args.mesh, context=args.context, rules=args.rules))
    return 0


def convert(args: argparse.Namespace) -> int:
    """Rewrite a checkpoint in hub layout: another dtype, other shard sizes, or safetensors from torch files."""
    from fdel import models, params

    source, target = params.resolve(args.source), Path(args.target)
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty; choose a new directory, nothing is overwritten")
    model = models.load(source, dtype=args.dtype)
    models.save(model, target, shard_bytes=round(args.shard_gb * 1e9))
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            shutil.copy(file, target / file.name)
    print(f"{target}: {params.count(model.params):,} parameters, {params.nbytes(model.params):,} bytes")
    return 0


def diff(args: argparse.Namespace) -> int:
    """Compare two checkpoints tensor by tensor; exit code 1 if they differ."""
    from fdel import params, report

    count = 0
    for line in report.diff(params.resolve(args.a), params.resolve(args.b), tolerance=args.tolerance):
        print(line)
        count += 1
    print(f"{count} differences" if count else "equal")
    return min(count, 1)


def plan(args: argparse.Namespace) -> int:
    """Compile a training step for a mesh that need not exist here; print its memory, FLOPs and collectives."""
    import jax

    from fdel import models, plan

    # The devices are virtual: they make the compiler divide the program, and hold nothing.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    family, cfg = models.read_config(Path(args.model))
    names = ("mesh", "rows", "length", "microbatches", "dtype", "optimizer", "remat")
    training = plan.Training(**{name: getattr(args, name) for name in names})
    print(plan.report(family, cfg, training, memory=args.memory))
    return 0


def bench(args: argparse.Namespace) -> int:
    """Measure prefill, decode, a training step and loading of a checkpoint on this machine."""
    from fdel import bench, params

    for line in bench.lines(params.resolve(args.model), dtype=args.dtype, train=not args.no_train):
        print(line, flush=True)
    return 0


def known_dtype(name: str) -> str:
    """Check the name of a floating dtype."""
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"{name!r} is unknown; use one of {', '.join(DTYPES)}")
    return name


def generate_options(p: argparse.ArgumentParser, dtype: dict) -> None:
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


def parser() -> argparse.ArgumentParser:
    """Describe all commands and their options."""
    main = argparse.ArgumentParser(prog="fdel", description="Train, fine-tune and serve language models in JAX.")
    main.add_argument("--version", action="version", version=f"fdel {fdel.__version__}")
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(run: Callable[[argparse.Namespace], int], *positional: tuple[str, str]) -> argparse.ArgumentParser:
        text = run.__doc__ or ""
        p = commands.add_parser(run.__name__, help=text, description=text)
        for name, hint in positional:
            p.add_argument(name, help=hint)
        p.set_defaults(run=run)
        return p

    checkpoint = ("model", "checkpoint directory in Hugging Face layout, or a Hub id (extra `hub`)")
    dtype: dict = {
        "type": known_dtype,
        "help": "cast weights to this dtype, such as float32 or bfloat16 (default: as stored)",
    }
    p = command(demo)
    p.add_argument(
        "--out", type=Path, default=Path("fdel-demo"), help="directory for the checkpoint (default: %(default)s)"
    )
    p.add_argument("--prompt", default="The following", help="text to complete (default: %(default)r)")
    p.add_argument("--steps", type=int, default=300, help="training steps at the most (default: %(default)s)")
    p.add_argument("--seconds", type=float, default=60, help="training time at the most (default: %(default)s)")
    p.add_argument("--max-tokens", type=int, default=80, help="tokens to write (default: %(default)s)")
    generate_options(command(generate, checkpoint, ("prompt", "text to continue")), dtype)
    p = command(info, checkpoint)
    p.add_argument("--mesh", help="also print the shards on a mesh, such as fsdp=2,tp=4")
    p.add_argument("--rules", choices=("train", "serve"), default="train", help="sharding rules (default: %(default)s)")
    p.add_argument("--context", type=int, help="context length for FLOPs (default: the model's longest)")
    p = command(convert, ("source", checkpoint[1]), ("target", "new directory"))
    p.add_argument("--dtype", **dtype)
    p.add_argument(
        "--shard-gb", type=float, default=5.0, help="size of a file in GB at the most (default: %(default)s)"
    )
    p = command(diff, ("a", checkpoint[1]), ("b", "the other one"))
    p.add_argument("--tolerance", type=float, default=0.0, help="accept differences up to this (default: %(default)s)")
    p = command(plan, ("model", "directory with a config.json; weights are not needed"))
    p.add_argument("--devices", type=int, required=True, help="number of devices")
    p.add_argument(
        "--mesh", default="fsdp=-1", help="sizes of the mesh axes, such as fsdp=64,tp=4 (default: %(default)s)"
    )
    p.add_argument("--rows", type=int, required=True, help="rows of a step's batch, on all devices together")
    p.add_argument("--length", type=int, default=4096, help="tokens per row (default: %(default)s)")
    p.add_argument("--microbatches", type=int, default=1, help="parts of the batch, in turn (default: %(default)s)")
    p.add_argument("--dtype", type=known_dtype, default="bfloat16", help="of the parameters (default: %(default)s)")
    p.add_argument("--optimizer", default="adamw", help="by name (default: %(default)s)")
    p.add_argument("--remat", help="what the backward pass computes again, such as nothing_saveable (default: nothing)")
    p.add_argument("--memory", type=float, help="GiB of a device, to say whether the step fits")
    p = command(bench, checkpoint)
    p.add_argument("--dtype", **dtype)
    p.add_argument("--no-train", action="store_true", help="leave out the training step")
    return main


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors that a user can mend are one line on standard error."""
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except (OSError, ValueError, ImportError) as e:
        print(f"fdel {args.command}: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        with contextlib.suppress(BrokenPipeError):
            print("interrupted", file=sys.stderr)
        return 130
