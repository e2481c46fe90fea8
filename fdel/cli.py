"""The command line: `fdel COMMAND --help` describes each command. Exit codes: 0 done, 1 differences, 2 an error."""

import argparse
import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import fdel
from fdel import options, output

# Files beside the weights that make a checkpoint usable.
COMPANIONS = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "generation_config.json", "*.jinja")


def demo(args: argparse.Namespace) -> int:
    """Train a small Llama on real text, save it, load it back and let it complete a sentence."""
    from fdel import demo

    demo.main(args.out, args.prompt, args.steps, args.seconds, args.max_tokens, args.serve)
    return 0


def generate(args: argparse.Namespace) -> int:
    """Continue a prompt with a checkpoint and stream the text."""
    from fdel import demo, params, text
    from fdel.serve import weights

    directory = params.resolve(args.model)
    tok = text.load(directory)
    prompt: str | list[int] = args.prompt
    if args.chat:
        rendered = text.render_chat(tok, [{"role": "user", "content": args.prompt}], add_generation_prompt=True)
        prompt = text.encode(tok, rendered, special=False)
    model = weights.load(directory, dtype=args.dtype, mesh=weights.mesh_for(args.mesh))
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
    """Rewrite a checkpoint in hub layout: another dtype, other shard sizes, safetensors from torch files or from EasyLM."""
    from fdel import models, params

    target, shard_bytes = Path(args.target), round(args.shard_gb * 1e9)
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty; choose a new directory, nothing is overwritten")
    if args.format == "easylm":
        from fdel import easylm

        count = easylm.convert(args.source, args.config, target, dtype=args.dtype, shard_bytes=shard_bytes)
        print(f"{target}: {count:,} parameters")
        return 0
    source = params.resolve(args.source)
    model = models.load(source, dtype=args.dtype)
    models.save(model, target, shard_bytes=shard_bytes)
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
    if Path(args.model).is_file():
        from fdel import recipe

        family, cfg, training = recipe.planned(recipe.load(args.model))
    else:
        names = ("mesh", "rows", "length", "microbatches", "dtype", "optimizer", "remat")
        training = plan.Training(**{name: getattr(args, name) for name in names})
        family, cfg = models.read_config(args.model)
    if training.rows is None:
        raise ValueError("--rows is missing: the rows of a step's batch, on all devices together")
    print(plan.report(family, cfg, training, memory=args.memory))
    return 0


def run(args: argparse.Namespace) -> int:
    """Do what a run file says: train a model, and what else its actions are."""
    from fdel import recipe

    file = args.recipe or args.config
    if args.keys:
        print(recipe.reference())
        return 0
    if file is None:
        raise ValueError("no run file is given; `fdel run --keys` lists what one may say")
    wanted = recipe.load(file)
    for change in args.set:
        path, _, value = change.partition("=")
        with contextlib.suppress(ValueError):  # what is no JSON is text
            value = recipe.files.from_json(value)
        wanted = wanted.set(path, value)
    if args.dry_run:
        print(recipe.dumps(wanted, defaults=True), end="")
        recipe.prepare(wanted, args.devices)
    else:
        recipe.run(wanted)
    return 0


def bench(args: argparse.Namespace) -> int:
    """Measure prefill, decode, a training step and loading of a checkpoint on this machine."""
    from fdel import bench, params

    directory = params.resolve(args.model)
    if args.attention:
        measured = bench.attention(directory, args.attention, dtype=args.dtype)
    else:
        measured = bench.lines(directory, dtype=args.dtype, mesh=args.mesh, train=not args.no_train)
    for line in measured:
        print(line, flush=True)
    return 0


def plot(args: argparse.Namespace) -> int:
    """Draw the curves of runs to a PNG and to an HTML report that needs no other file."""
    from fdel import plot

    for path in plot.main(args.runs, args.out, args.metric):
        print(path)
    return 0


def monitor(args: argparse.Namespace) -> int:
    """Print what a server does, a line at a time; or a dashboard with the same graphs for Grafana."""
    from fdel import monitor

    if args.grafana:
        print(json.dumps(monitor.dashboard(), indent=1))
        return 0
    key = args.key_file.read_text().strip() if args.key_file else ""
    for line in monitor.lines(args.address, key, args.every):
        print(line, flush=True)
    return 0


def serve(args: argparse.Namespace) -> int:
    """Serve checkpoints over HTTP, as OpenAI's API."""
    from fdel.serve import engine, launch

    sizes = ("rows", "pages", "max_length", "budget", "chunk", "queue", "drafts", "decode_steps", "kv_cache_dtype",
             "max_loras", "max_lora_rank")  # fmt: skip
    settings = engine.Settings(**{name: getattr(args, name) for name in sizes})
    names = ("host", "port", "names", "dtype", "mesh", "draft", "quantize", "tool_parser", "key_file", "audit", "insecure",
             "grace", "adapter_root", "truncate")  # fmt: skip
    given = {name: getattr(args, name) for name in names} | ({"programs": args.programs} if "programs" in args else {})
    adapters = dict(pair.split("=", 1) for pair in args.adapter)
    launch.main(args.models, launch.Options(**given, adapters=adapters, settings=settings))
    return 0


def eval(args: argparse.Namespace) -> int:
    """Run lm_eval's benchmarks on a checkpoint; print a table of the scores and write them as JSON."""
    from fdel.serve import evaluate

    names = ("tasks", "include_path", "num_fewshot", "limit", "max_new_tokens", "temperature", "top_p", "batch",
             "apply_chat_template", "system_instruction")  # fmt: skip
    wanted = evaluate.Options(**{name: getattr(args, name) for name in names})
    how = {name: getattr(args, name) for name in ("dtype", "mesh", "quantize", "max_length")}
    evaluate.main(args.model, wanted, args.output, **how)
    return 0


def keys(args: argparse.Namespace) -> int:
    """Make, list and remove API keys of a server. The secret of a new key is shown once."""
    from fdel.serve import auth, keyfile

    file = Path(args.file)
    if args.do == "list":
        for key in keyfile.load(file).values():
            print(key.id, key.role, key.name if key.name.isprintable() else repr(key.name))
    elif args.do == "add":
        rates = {name: getattr(args, name) for name in ("requests_per_minute", "tokens_per_minute")}
        key, secret = auth.create(args.name, args.role, time.time(), **rates)
        keyfile.change(file, lambda known: {**known, key.hash: key})
        print(secret)
    else:

        def rest(known: dict[str, auth.Key]) -> dict[str, auth.Key]:
            if args.name not in {key.id for key in known.values()}:
                raise ValueError(f"{file} has no key with the id {args.name!r}; `fdel keys {file} list` shows them")
            return {h: key for h, key in known.items() if key.id != args.name}

        keyfile.change(file, rest)
    return 0


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
        "type": options.dtype,
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
    p.add_argument("--serve", action="store_true", help="keep the server and its playground running until Ctrl-C")
    options.generate(command(generate, checkpoint, ("prompt", "text to continue")), dtype)
    p = command(info, checkpoint)
    p.add_argument("--mesh", help="also print the shards on a mesh, such as fsdp=2,tp=4")
    p.add_argument("--rules", choices=("train", "serve"), default="train", help="sharding rules (default: %(default)s)")
    p.add_argument("--context", type=int, help="context length for FLOPs (default: the model's longest)")
    options.convert(command(convert, ("source", checkpoint[1]), ("target", "new directory")), dtype)
    p = command(diff, ("a", checkpoint[1]), ("b", "the other one"))
    p.add_argument(
        "--tolerance", type=float, default=0.0, help="accept differences up to this, and of dtype (%(default)s)"
    )
    options.run(command(run))
    options.plan(command(plan, ("model", "a run file, or a directory with a config.json; the options belong to that")))
    options.bench(command(bench, checkpoint), dtype)
    options.serve(command(serve), dtype)
    options.monitor(command(monitor))
    options.eval(command(eval, checkpoint), dtype)
    options.keys(command(keys, ("file", "the key file; made if it is not there")))
    p = command(plot)
    p.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run, or its metrics.jsonl")
    p.add_argument(
        "--out", type=Path, default=Path("curves"), help="name of the files; .png or .html: only that one (%(default)s)"
    )
    p.add_argument("--metric", action="append", default=[], help="draw only this one (may be given several times)")
    return main


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors that a user can mend are one line on standard error."""
    with contextlib.redirect_stdout(output.Output(sys.stdout)) as out:
        try:
            return _run(argv)
        finally:
            out.flush()


def _run(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except (OSError, ValueError, ImportError, ArithmeticError) as e:
        print(f"fdel {args.command}: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        with contextlib.suppress(BrokenPipeError):
            print("interrupted", file=sys.stderr)
        return 130
