"""Run lm_eval's benchmarks (extra `eval`) on an engine or a checkpoint, and report their results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fdel import params, text
from fdel.serve import harness, weights
from fdel.serve.engine import Engine, Settings


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run, and how.

    tasks: names or patterns of lm_eval's tasks, or of those in `include_path`, a directory of YAML files (which may name
    Python code, so it must be yours). limit: examples per task, or a share of them below 1. max_new_tokens, temperature
    and top_p replace what tasks say of themselves. batch: rows scored at a time. cache_requests: keep prompts for the
    next run; lm_eval writes them as pickle beside its own code and does not notice when a task has changed.
    """

    tasks: Sequence[str]
    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: int | float | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    batch: int = 32
    apply_chat_template: bool = False
    system_instruction: str | None = None
    cache_requests: bool = False
    progress: bool = True


def find(options: Options) -> Any:
    """Look the tasks up: an lm_eval TaskManager that knows them all. ValueError for names that are unknown.

    lm_eval's own 14,000 are read (half a minute) only if `include_path` lacks one.
    """
    harness.check_installed()
    from lm_eval.tasks import TaskManager

    place = options.include_path
    if place is not None and not place.is_dir():
        raise ValueError(f"include_path={place} is no directory; give the one that holds the tasks' YAML files")
    if not options.tasks:
        raise ValueError("no tasks are given; name some, such as hellaswag")
    missing = lambda m: [name for name in options.tasks if not m.match_tasks([name])]
    manager = None if place is None else TaskManager(include_path=str(place), include_defaults=False)
    if manager is None or missing(manager):
        manager = TaskManager(include_path=None if place is None else str(place))
    if unknown := missing(manager):
        raise ValueError(
            f"lm_eval has no task {', '.join(map(repr, unknown))}; `lm_eval ls tasks` lists all, include_path adds yours"
        )
    return manager


def evaluate(engine: Engine, tokenizer: text.Tokenizer, options: Options, name: str, manager: Any = None) -> dict:
    """Run the tasks: lm_eval's results, {"results": {task: {"acc,none": ...}}, "versions": ...}, ready for JSON.

    `name` is the model's. `manager` is what `find` gave.
    """
    manager = find(options) if manager is None else manager
    from lm_eval import simple_evaluate
    from lm_eval.utils import handle_non_serializable

    given: dict[str, Any] = {"max_gen_toks": options.max_new_tokens, "temperature": options.temperature}
    given |= {"top_p": options.top_p, "do_sample": None if options.temperature is None else options.temperature > 0}
    found = simple_evaluate(
        harness.language_model(engine, tokenizer, name, batch=options.batch, progress=options.progress),
        tasks=manager.match_tasks(list(options.tasks)), task_manager=manager, num_fewshot=options.num_fewshot,
        limit=options.limit, gen_kwargs={k: v for k, v in given.items() if v is not None} or None,
        apply_chat_template=options.apply_chat_template, system_instruction=options.system_instruction,
        cache_requests=options.cache_requests, log_samples=False, batch_size=options.batch,
    )  # fmt: skip
    results: dict[str, Any] = found or {}
    results.pop("pretty_env_info", None)  # says much about this machine and nothing of the model
    return json.loads(json.dumps(results, default=handle_non_serializable))


def main(
    directory: str | Path,
    options: Options,
    output: Path | None = None,
    *,
    dtype: Any = None,
    mesh: str | None = None,
    quantize: str | None = None,
    max_length: int | None = None,
) -> None:
    """Evaluate a checkpoint, print the scores, and write all results to `output`. What `fdel eval` does.

    ValueError for tasks that are unknown, FileExistsError for an output that is there, before the model is loaded.
    """
    new_file(output)
    over, manager, directory = weights.mesh_for(mesh), find(options), params.resolve(directory)
    model = weights.load(directory, dtype=dtype, mesh=over, quantize=quantize)
    tok = text.load(directory)
    engine = Engine(model, Settings(rows=options.batch, max_length=max_length), tokenizer=tok)
    results = evaluate(engine, tok, options, directory.resolve().name, manager)
    report(results, output)


def new_file(output: Path | None) -> None:
    """Make the directory of a file that is to be written; FileExistsError if the file is there."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.exists():
            raise FileExistsError(f"{output} is there already; nothing is overwritten, choose a new file")


def report(results: Mapping[str, Any], output: Path | None, show: bool = True) -> None:
    """Write results to a file and print their tables."""
    if output is not None:
        output.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", "utf-8")
    if show:
        print(table(results))


def table(results: Mapping[str, Any]) -> str:
    """Write results as lm_eval's Markdown tables, that of groups below."""
    from lm_eval.utils import make_table

    parts = [make_table(dict(results))] + ([make_table(dict(results), "groups")] if results.get("groups") else [])
    return "\n".join(parts)
