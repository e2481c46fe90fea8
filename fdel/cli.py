"""The command line: `fdel COMMAND --help` describes each command. Exit codes: 0 done, 1 differences, 2 an error."""

import argparse
import contextlib
import json
import math
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import fdel
from fdel import options, streams

# Files beside the weights that make a checkpoint usable.
COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "generation_config.json",
    "*.jinja", "chat_template.json", "*processor_config.json",
)  # fmt: skip

# ---- commands: each prints, or gives the lines to print; a number is the exit code ---------------------------------


def demo(args: argparse.Namespace) -> None:
    """Train a small Llama on real text, save it, load it back and let it complete a sentence."""
    from fdel import demo

    demo.main(args.out, args.prompt, args.steps, args.seconds, args.max_tokens, args.serve)


def generate(args: argparse.Namespace) -> None:
    """Continue a prompt with a checkpoint and stream the text."""
    from fdel import demo, params, text
    from fdel.serve.engine import weights

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


def info(args: argparse.Namespace) -> Iterable[str]:
    """Describe a checkpoint: parameters, bytes per dtype, FLOPs and cache bytes per token, shards on a mesh."""
    from fdel import params, report

    return [report.info(params.resolve(args.model), mesh=args.mesh, context=args.context, rules=args.rules)]


def convert(args: argparse.Namespace) -> Iterable[str]:
    """Rewrite a checkpoint in hub layout: other dtype or shard sizes, plain from quantized, of torch files or EasyLM."""
    from fdel import easylm, models, params

    target, how = args.target, {"dtype": args.dtype, "shard_bytes": _shard_bytes(args)}
    _empty(target)
    if args.format == "easylm":
        return [f"{target}: {easylm.convert(args.source, args.config, target, **how):,} parameters"]
    source = params.resolve(args.source)
    model = models.load(source, dtype=args.dtype)
    model = model._replace(params=params.dequantize(model.params))  # of a published quantized one
    models.save(model, target, shard_bytes=how["shard_bytes"])
    _accompany(source, target)
    return [f"{target}: {params.count(model.params):,} parameters, {params.nbytes(model.params):,} bytes"]


def quantize(args: argparse.Namespace) -> Iterable[str]:
    """Write a checkpoint with its layers' matrices in few bits, as vLLM and transformers read it."""
    from fdel import calibration, models, params, quantizing, text
    from fdel.params import writers

    scheme, most = writers.scheme(args.format, args.group, args.act_order), _shard_bytes(args)
    _empty(args.target)
    source = params.resolve(args.source)
    rows, how = None, {name: x for name in ("rows", "length") if (x := getattr(args, name)) is not None}
    if args.calibration:
        rows = calibration.read(args.calibration, text.load(source), **how)
    elif how:
        raise ValueError(f"--{' and --'.join(how)}: of calibration data; give --calibration FILE, or leave it out")
    model = models.load(source, dtype=args.dtype, stacked=False)
    size = quantizing.save(model, args.target, scheme, rows, shard_bytes=most, alpha=args.smooth)
    _accompany(source, args.target)
    seen = "" if rows is None else f", calibrated with {len(rows)} rows of {rows.shape[1]} tokens"
    of = f"{size:,} bytes of {params.nbytes(model.params):,}"
    return [f"{args.target}: {params.count(model.params):,} parameters, {of}{seen}"]


def _empty(target: Path) -> None:
    if target.exists() and (found := min((x.name for x in target.iterdir()), default=None)):
        left = " of a run that was stopped: delete it, or" if found.startswith(".partial-") else ":"
        raise FileExistsError(
            f"{target} is not empty, it has {found}{left} choose a new directory; nothing is overwritten"
        )


def _shard_bytes(args: argparse.Namespace) -> int:
    if not 1e-9 <= args.shard_gb < math.inf:
        raise ValueError(f"--shard-gb {args.shard_gb}: expected a number of GB above 0")
    return round(args.shard_gb * 1e9)


def _accompany(source: Path, target: Path) -> None:
    if source.suffix == ".gguf" or any(source.glob("*.gguf")):
        from fdel import text

        text.save(text.load(source), target)
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            shutil.copy(file, target / file.name)


def diff(args: argparse.Namespace) -> int:
    """Compare two checkpoints tensor by tensor; exit code 1 if they differ."""
    from fdel import params, report

    count = 0
    for line in report.diff(params.resolve(args.a), params.resolve(args.b), tolerance=args.tolerance):
        print(line)
        count += 1
    print(f"{count} differences" if count else "equal")
    return min(count, 1)


def plan(args: argparse.Namespace) -> Iterable[str]:
    """Compile a training step, or an engine's, for devices that need not be here; print memory, FLOPs and collectives."""
    import jax

    from fdel import aot, models, plan

    target = None if args.target is None else aot.parse_target(args.target)
    if (target is None) == (args.devices is None) or (args.serve and target is None):
        raise ValueError("give either --target, as v5p:4x4x4, or --devices; --serve needs --target")
    args.mesh = args.mesh or ("tp=-1" if args.serve else "fsdp=-1")
    # The devices are virtual: they make the compiler divide the program, and hold nothing.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices if target is None else target.count)
    if Path(args.model).is_file():
        from fdel import recipe

        family, cfg, training = recipe.planned(recipe.load(args.model))
    else:
        training = options.chosen(plan.Training, args)
        family, cfg = models.read_config(args.model)
    if training.rows is None:
        raise ValueError("--rows is missing: the rows of a step's batch, on all devices together")
    if target is None:
        return [plan.report(family, cfg, training, memory=args.memory)]
    serving = aot.Serving(training.mesh, training.rows, training.length, dtype=training.dtype)
    return [aot.report(target, family, cfg, serving if args.serve else training, memory=args.memory)]


def run(args: argparse.Namespace) -> Iterable[str]:
    """Do what a run file says: train a model, and what else its actions are."""
    from fdel import recipe

    file = args.recipe or args.config
    if args.keys:
        return [recipe.reference()]
    if file is None:
        raise ValueError("no run file is given; `fdel run --keys` lists what one may say")
    wanted = recipe.load(file)
    for change in args.set:
        path, _, value = change.partition("=")
        with contextlib.suppress(ValueError):  # what is no JSON is text
            value = recipe.files.from_json(value)
        wanted = wanted.set(path, value)
    if args.debug:
        wanted = wanted.set("trainer.debug", True)
    if args.dry_run:
        print(recipe.dumps(wanted, defaults=True), end="")
        recipe.prepare(wanted, args.devices)
    else:
        recipe.run(wanted)
    return ()


def bench(args: argparse.Namespace) -> Iterable[str]:
    """Measure prefill, decode, a training step and loading of a checkpoint on this machine."""
    from fdel import bench, params

    directory = params.resolve(args.model)
    if args.attention:
        return bench.attention(directory, args.attention, dtype=args.dtype)
    return bench.lines(directory, dtype=args.dtype, mesh=args.mesh, train=not args.no_train)


def plot(args: argparse.Namespace) -> Iterable[Any]:
    """Draw the curves of runs to a PNG and to an HTML report that needs no other file."""
    from fdel import plot

    return plot.main(args.runs, args.out, args.metric)


def monitor(args: argparse.Namespace) -> Iterable[str]:
    """Print what a server does, a line at a time; or a dashboard with the same graphs for Grafana."""
    from fdel import monitor

    if args.grafana:
        return [json.dumps(monitor.dashboard(), indent=1)]
    return monitor.lines(args.address, args.key_file.read_text().strip() if args.key_file else "", args.every)


def serve(args: argparse.Namespace) -> None:
    """Serve checkpoints over HTTP, as OpenAI's API."""
    from fdel.serve.engine import engine
    from fdel.serve.server import launch

    launch.main(args.models, options.chosen(launch.ServerOptions, args, settings=options.chosen(engine.Settings, args)))


def eval(args: argparse.Namespace) -> None:
    """Run lm_eval's benchmarks on a checkpoint; print a table of the scores and write them as JSON."""
    from fdel.serve.server import evaluate

    how = {name: getattr(args, name) for name in ("dtype", "mesh", "quantize", "max_length")}
    evaluate.main(args.model, options.chosen(evaluate.Options, args), args.output, **how)


def keys(args: argparse.Namespace) -> Iterable[str]:
    """Make, list and remove API keys of a server. The secret of a new key is shown once."""
    from fdel.serve.server import auth, keyfile

    if args.do == "list":
        shown = lambda name: name if name.isprintable() else repr(name)
        return [f"{key.id} {key.role} {shown(key.name)}" for key in keyfile.load(args.file).values()]
    if args.do == "add":
        rates = {name: getattr(args, name) for name in ("requests_per_minute", "tokens_per_minute")}
        key, secret = auth.create(args.name, args.role, time.time(), **rates)
        keyfile.change(args.file, lambda known: {**known, key.hash: key})
        return [secret]

    def rest(known: dict[str, auth.Key]) -> dict[str, auth.Key]:
        left = {h: key for h, key in known.items() if key.id != args.name}
        if len(left) == len(known):
            raise ValueError(f"{args.file} has no key with the id {args.name!r}; see `fdel keys {args.file} list`")
        return left

    keyfile.change(args.file, rest)
    return ()


# ---- the program ---------------------------------------------------------------------------------------------------


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """Describe all commands, and the options of one: those of `serve` take a second to import."""
    main = argparse.ArgumentParser(prog="fdel", description="Train, fine-tune and serve language models in JAX.")
    main.add_argument("--version", action="version", version=f"fdel {fdel.__version__}")
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for do in (demo, generate, info, convert, quantize, diff, plan, run, bench, serve, monitor, eval, keys, plot):
        p = commands.add_parser(do.__name__, help=do.__doc__, description=do.__doc__)
        p.set_defaults(run=do)
        if do.__name__ == command:
            options.add(p, command)
    return main


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors that a user can mend are one line on standard error."""
    streams.opened()
    with contextlib.redirect_stdout(streams.Output(sys.stdout)) as out:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            out.flush()


def _run(argv: Sequence[str]) -> int:
    args = parser(next((word for word in argv if not word.startswith("-")), None)).parse_args(argv)
    try:
        found = args.run(args)
        if isinstance(found, int):
            return found
        for line in found or ():
            print(line, flush=True)
        return 0
    except (OSError, ValueError, ImportError, ArithmeticError) as e:
        print(f"fdel {args.command}: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        with contextlib.suppress(BrokenPipeError):
            print("interrupted", file=sys.stderr)
        return 130
