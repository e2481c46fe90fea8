"""Start a server: load checkpoints, compile, listen. What `fdel serve` does."""

import asyncio
import faulthandler
import logging
import math
import os
import signal
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import jax

from fdel import models, params, text
from fdel.media import sight
from fdel.params.mesh import spread
from fdel.serve.engine import weights
from fdel.serve.engine.engine import Engine
from fdel.serve.engine.settings import Settings
from fdel.serve.engine.step import PAGE, compute_dtype, mesh_of, quantized
from fdel.serve.server import audio, auth, dual, http, keyfile, labels, metrics, tools
from fdel.serve.server.call import Server, picture_quota
from fdel.serve.server.openai.media import Media
from fdel.serve.server.options import ServerOptions as ServerOptions
from fdel.serve.server.served import ServedModel, served_model
from fdel.serve.server.tokenizing import PAIRS


def main(directories: Sequence[str | Path], options: ServerOptions) -> None:
    """Serve checkpoints until SIGTERM. ValueError for options that do not fit, before anything is loaded."""
    keys = check(options)
    names = list(options.names) or [Path(d).resolve().name for d in directories]
    every = [*names, *options.adapters]
    if len(names) != len(directories) or len(set(every)) < len(every):
        raise ValueError(
            f"the names {', '.join(every)} for {len(directories)} models; expected one for each, none twice"
        )
    if options.draft is not None and len(directories) > 1:
        raise ValueError(f"draft={options.draft!r} for {len(directories)} models; a draft model guesses for one")
    places = [params.resolve(directory) for directory in directories]
    if not any(map(_by_engine, places)) and (idle := _of_engine(options)):
        which = ", ".join(map(str, places))
        raise ValueError(f"{', '.join(idle)}: of an engine, which {which} has no use for; leave them out")
    mesh, found, heard = weights.mesh_for(options.mesh), list[ServedModel](), list[audio.HeardModel]()
    scored, labelled = list[dual.DualModel](), list[labels.LabelModel]()
    for name, directory in zip(names, places, strict=True):
        if models.hearing(directory) is not None:
            heard.append(audio.heard_model(directory, name, options.dtype))
            continue
        if models.scoring(directory) is not None:
            scored.append(dual.dual_model(directory, name, options.dtype, options.images))
            continue
        if models.labelling(directory) is not None:
            labelled.append(labels.label_model(directory, name, options.dtype, options.sounds))
            continue
        model = weights.load(directory, dtype=options.dtype, mesh=mesh, quantize=options.quantize)
        pooling = models.pooling.read(directory)
        found += served(model, text.load(directory), name, options, {} if found else options.adapters, pooling,
                        sight.read(directory) if hasattr(model.family, "encode") else None)  # fmt: skip
    listen(found, options, keys, heard, scored, labelled)


def _by_engine(directory: Path) -> bool:
    """Tell whether an engine serves a directory: what writes, embeds or scores texts."""
    return not (models.hearing(directory) or models.scoring(directory) or models.labelling(directory))


def _of_engine(options: ServerOptions) -> list[str]:
    """Name the options that were given and belong to engines."""
    own = "mesh quantize rules draft adapters tool_parser score_template truncate adapter_root".split()
    given = lambda found, usual, names: [n for n in names if getattr(found, n) != getattr(usual, n)]
    sizes = given(options.settings, Settings(), [f.name for f in fields(Settings)])
    return given(options, ServerOptions(), own) + sizes


def check(options: ServerOptions) -> dict[str, auth.Key] | None:
    """Read the keys. ValueError for an address that needs some, and for a file, directory or parser that is none."""
    keys = None if options.key_file is None else keyfile.load(options.key_file)
    http.check_host(options.host, keys, options.insecure)
    if options.tool_parser not in (None, "none", *tools.FORMATS):
        known = ", ".join([*tools.FORMATS, "none"])
        raise ValueError(f"tool_parser={options.tool_parser!r} is unknown; use one of {known}")
    if options.adapter_root is not None and not options.adapter_root.is_dir():
        raise ValueError(f"adapter_root={options.adapter_root} is no directory")
    if not 0 < options.video_cpu < math.inf:
        raise ValueError(f"video_cpu={options.video_cpu}; expected seconds, more than 0")
    return keys


def served(model: models.Model, tok: text.Tokenizer, name: str, options: ServerOptions,
           adapters: Mapping[str, str] | None = None, pooling: models.pooling.Pooling | None = None,
           seen: sight.Sight | None = None) -> list[ServedModel]:  # fmt: skip
    """Make an engine of a model: what it serves under its name, and under those of adapters. Nothing is started."""
    if options.score_template is not None:
        tok = replace(tok, templates={**tok.templates, PAIRS: options.score_template.read_text("utf-8")})
    engine = make_engine(model, tok, options, adapters, pooling, seen)
    most = Media(options.images, options.videos, options.sounds)
    first = replace(served_model(engine, name, options.tool_parser, options.truncate), media=most)
    return [first, *(first.with_adapter(n) for n in adapters or ())]


def make_engine(
    model: models.Model, tok: text.Tokenizer, options: ServerOptions, adapters: Mapping[str, str] | None = None,
    pooling: models.pooling.Pooling | None = None, seen: sight.Sight | None = None,
) -> Engine:  # fmt: skip
    """Make an engine as options say, with adapters by their directories; a draft model guesses 3 tokens by default.

    With `pooling` it embeds texts of at most as many tokens, and writes none. `seen` is how the model sees.
    """
    model = weights.placed(model, options.rules or params.SERVE)
    spec = params.unstack(models.spec_of(model))
    settings = options.settings
    load = lambda path: params.load_peft(spec, model.params, path, max_rank=settings.lora_rank)
    adapted = {n: load(path) for n, path in (adapters or {}).items()}
    if pooling is not None and pooling.length is not None and settings.max_length is None:
        settings = replace(
            settings, max_length=min(pooling.length, getattr(model.cfg, "max_positions", pooling.length))
        )
    if settings.pages is None and pooling is None and models.heads.no_text(model) is None:
        settings = replace(settings, pages=pages_that_fit(model, options.memory, settings.kv_cache_dtype))
    draft = None
    if options.draft is not None:
        draft = weights.load(options.draft, dtype=options.dtype, mesh=mesh_of(model.params))
        if reason := models.heads.no_text(draft):
            raise ValueError(f"{options.draft}: {reason}")
        settings = replace(settings, drafts=settings.drafts or 3)
    return Engine(model, settings, tokenizer=tok, adapters=adapted, draft=draft, pooling=pooling, sight=seen)


def dump_threads_on(signum: int) -> None:
    """Write where every thread stands to standard error, when the main thread next runs Python after this signal.

    Not by `faulthandler.register`: that reads other threads' frames while they run, which ended the process at times.
    """
    signal.signal(signum, lambda *_: faulthandler.dump_traceback())
    signal.siginterrupt(signum, False)  # whatever a library waits for in another thread goes on


def listen(
    found: Sequence[ServedModel], options: ServerOptions, keys: dict[str, auth.Key] | None,
    heard: Sequence[audio.HeardModel] = (), scored: Sequence[dual.DualModel] = (),
    labelled: Sequence[labels.LabelModel] = (),
) -> None:  # fmt: skip
    """Compile, then answer requests until SIGTERM; `keys` are those of `check`."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    http.audit.propagate = False
    if options.audit is not None:
        file = os.open(options.audit, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if stat.S_ISREG(os.fstat(file).st_mode):  # for its owner alone, also if it was there
            os.fchmod(file, 0o600)
        http.audit.addHandler(logging.StreamHandler(os.fdopen(file, "a")))
    dump_threads_on(signal.SIGUSR1)
    if options.programs is not None:
        # What lies there is run: it is the user's alone
        options.programs.mkdir(mode=0o700, parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(options.programs))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    for s in found:
        s.engine.start()
    for h in heard:
        h.scribe.start()
    named, hearing, scoring = {s.name: s for s in found}, {h.name: h for h in heard}, {s.name: s for s in scored}
    naming = {s.name: s for s in labelled}
    every = [*named, *hearing, *scoring, *naming]
    counted = metrics.Metrics(metrics.serving(every, http.PATHS))
    hosts = None if options.insecure else (options.host.lower(),)
    watch = None if options.key_file is None else keyfile.Watch(options.key_file)
    server = Server(
        named, counted, keys, watch, hosts, options.adapter_root, heard=hearing, dual=scoring, labels=naming
    )
    limits = "audio_seconds audio_bytes image_bytes image_pixels video_bytes video_pixels video_cpu"
    for name in limits.split():
        setattr(server, name, getattr(options, name))
    server.pictures = picture_quota(options.image_memory)
    server.media_hosts = frozenset(host.lower() for host in options.media_hosts)

    def started(port: int) -> None:
        print(f"serving {', '.join(every)} at http://{options.host}:{port}/v1", file=sys.stderr, flush=True)

    asyncio.run(http.run(server, options.host, options.port, options.grace, started))


def pages_that_fit(model: models.Model, share: float, kv_cache_dtype: str | None = None) -> int | None:
    """Count the cache pages for which a share of the device's memory has room; None if the device does not tell."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    spec = lambda pages: model.family.state_spec(model.cfg, pages=pages, page=PAGE, rows=1)
    mesh, dtype = mesh_of(model.params), compute_dtype(model.params)

    def size(pages: int) -> int:
        tree = spread(quantized(spec(pages), kv_cache_dtype), mesh)
        return params.nbytes(tree, dtype, None if mesh is None else params.shardings(tree, mesh, params.SERVE))

    page = size(2) - size(1)
    free = share * stats["bytes_limit"] - stats["bytes_in_use"]
    return max(1, int(free // page)) if page else None
