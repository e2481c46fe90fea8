"""Run lm_eval's benchmarks (EleutherAI's lm-evaluation-harness, extra `eval`) on an engine or a checkpoint.

What lm_eval's own backend for transformers does to prompts, to contexts that are too long and to stop strings is done
here too, so that scores are comparable. https://github.com/EleutherAI/lm-evaluation-harness
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fdel import params, text
from fdel.serve.engine import weights
from fdel.serve.engine.engine import Engine, Settings
from fdel.serve.engine.request import SamplingParams
from fdel.serve.engine.settings import documented, setting
from fdel.serve.likelihood import likelihoods

SEED = 1234  # of what is sampled, lm_eval's own
ROUND = 16  # batches of prompts that are generated before progress is told
SAMPLED = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@documented
@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run, and how: each option declared once, for Python, for `fdel eval` and for run files."""

    tasks: Sequence[str] = setting(MISSING, "names or patterns of lm_eval's tasks, or of include_path's; required",
        "--tasks A,B")  # fmt: skip
    include_path: str | Path | None = setting(
        None, "directory with tasks of your own, in lm_eval's YAML, which may name Python code", "--include-path DIR"
    )
    num_fewshot: int | None = setting(None, "examples in the prompt (default: the task's)", "--num-fewshot K")
    limit: int | float | None = setting(None, "examples per task, below 1 a share of them (default: all)", "--limit N")
    max_new_tokens: int | None = setting(None, "longest answer (default: the task's)", "--max-new-tokens N")
    temperature: float | None = setting(None, "0 takes the likeliest token (default: the task's, mostly 0)")
    top_p: float | None = setting(None, "draw from the likeliest tokens of this mass (default: the task's, mostly all)")
    batch: int = setting(32, "sequences at a time")
    apply_chat_template: bool = setting(False, "send prompts through the chat template")
    system_instruction: str | None = setting(None, "system message", "--system-instruction TEXT")
    cache_requests: bool = setting(False, "keep the prompts of a task for the next run: lm_eval pickles them beside its "
        "code, and sees no change of it", None)  # fmt: skip
    progress: bool = setting(True, "show progress", None)


def find(options: Options) -> Any:
    """Look the tasks up: an lm_eval TaskManager that knows them all. ValueError for names that are unknown.

    lm_eval's own 14,000 are read (half a minute) only if `include_path` lacks one.
    """
    check_installed()
    from lm_eval.tasks import TaskManager

    place = None if options.include_path is None else Path(options.include_path)
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
        language_model(engine, tokenizer, name, batch=options.batch, progress=options.progress),
        tasks=manager.match_tasks(list(options.tasks)), task_manager=manager, num_fewshot=options.num_fewshot,
        limit=options.limit, gen_kwargs={k: v for k, v in given.items() if v is not None} or None,
        apply_chat_template=options.apply_chat_template, system_instruction=options.system_instruction,
        cache_requests=options.cache_requests, log_samples=False, batch_size=options.batch,
    )  # fmt: skip
    results: dict[str, Any] = found or {}
    results.pop("pretty_env_info", None)  # says much about this machine and nothing of the model
    return json.loads(json.dumps(results, default=handle_non_serializable))


def main(
    directory: str | Path, options: Options, output: Path | None = None, *, dtype: Any = None, mesh: str | None = None,
    quantize: str | None = None, max_length: int | None = None,
) -> None:  # fmt: skip
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


def new_file(output: str | Path | None) -> None:
    """Make the directory of a file that is to be written; FileExistsError if the file is there."""
    if output is not None:
        output = Path(output)
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.exists():
            raise FileExistsError(f"{output} is there already; nothing is overwritten, choose a new file")


def report(results: Mapping[str, Any], output: str | Path | None, show: bool = True) -> None:
    """Write results to a file and print lm_eval's Markdown tables of them, that of groups below."""
    from lm_eval.utils import make_table

    if output is not None:
        Path(output).write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", "utf-8")
    for part in ("results", "groups") if show else ():
        if part == "results" or results.get(part):
            print(make_table(dict(results), part))


def check_installed() -> None:
    """ImportError with the remedy if lm_eval is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as e:
        raise ImportError("benchmarks need lm_eval: pip install 'fdel[eval]'") from e


def language_model(
    engine: Engine, tokenizer: text.Tokenizer, name: str, *, batch: int = 32, adapter: str = "", progress: bool = True
) -> Any:
    """Make an lm_eval `LM` of an engine, as `lm_eval.simple_evaluate(model=...)` takes it."""
    check_installed()
    from lm_eval.api.model import TemplateLM

    class EngineLM(_EngineLM, TemplateLM):
        """`TemplateLM` divides pairs of texts into tokens and calls the rest."""

    return EngineLM(engine, tokenizer, name, batch, adapter, progress)


class _EngineLM:
    """How an engine answers each kind of request of lm_eval's `TemplateLM`."""

    eot_token_id = prefix_token_id = -1  # these and the name are properties without a setter there
    tokenizer_name, max_gen_toks = "", 256
    cache_hook: Any  # lm_eval's

    def __init__(
        self, engine: Engine, tokenizer: text.Tokenizer, name: str, batch: int, adapter: str, progress: bool
    ) -> None:
        super().__init__()
        self.engine, self.tokenizer, self.batch, self.adapter = engine, tokenizer, batch, adapter
        self.progress, self.max_length = progress, engine.limit
        ends = tokenizer.ids.get("eos", next(iter(engine.eos), None))
        if ends is None:
            raise ValueError("the tokenizer has no eos token, which lm_eval needs; name one in tokenizer_config.json")
        self.eot_token_id, self.prefix_token_id = ends, tokenizer.ids.get("bos", ends)
        # What distinguishes this tokenizer and its templates from others of the same name.
        said = tokenizer.json + json.dumps(dict(tokenizer.templates), sort_keys=True)
        self.tokenizer_name = f"{name.replace('/', '__')}-{hashlib.sha256(said.encode()).hexdigest()[:16]}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        """Tokenize; bos is not added to a text that begins with it, unless `add_special_tokens` says so."""
        if add_special_tokens is None:
            begins = text.decode(self.tokenizer, [self.prefix_token_id], skip_special=False)
            add_special_tokens = not string.startswith(begins)
        return text.encode(self.tokenizer, string, special=add_special_tokens)

    def _likely(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        with tqdm(total=len(pairs), desc="scoring", disable=not self.progress) as bar:
            found = likelihoods(self.engine, pairs, batch=self.batch, adapter=self.adapter, progress=bar.update)
        return [(x.logprob, x.greedy) for x in found]

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, **ignored: Any) -> list:
        found = self._likely([(context, wanted) for _, context, wanted in requests])
        for (pair, *_), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", pair, answer)
        return found

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, in windows of the model's context."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows, owners = [], []
        for i, (said,) in enumerate(r.args for r in requests):
            for window in get_rolling_token_windows(self.tok_encode(said), self.prefix_token_id, self.max_length, 1):
                windows.append(make_disjoint_window(window))
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, (logprob, _) in zip(owners, self._likely(windows), strict=True):
            totals[i] += logprob
        for r, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", r.args, total)
        return totals

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Continue contexts; those that leave no room for the answer are cut from the left."""
        prompts: list[list[int]] = []
        sampling: list[SamplingParams] = []
        for i, (context, asked) in enumerate(r.args for r in requests):
            s = sampling_of(asked, SEED + i)
            if s.max_tokens >= self.max_length:
                raise ValueError(
                    f"a task asks for {s.max_tokens} new tokens, but the model's limit is {self.max_length}; "
                    "lower max_new_tokens"
                )
            prompts.append(self.tok_encode(context)[-(self.max_length - s.max_tokens) :])
            sampling.append(s)
        out: list[str] = []
        step = ROUND * self.batch
        with tqdm(total=len(prompts), desc="generating", disable=not self.progress) as bar:
            for i in range(0, len(prompts), step):
                for g in self.engine.generate(prompts[i : i + step], sampling[i : i + step], adapter=self.adapter):
                    if g.error is not None:
                        raise RuntimeError(f"request {len(out)} failed: {g.error}")
                    self.cache_hook.add_partial("generate_until", requests[len(out)].args, g.text or "")
                    out.append(g.text or "")
                bar.update(len(out) - bar.n)
        return out

    def apply_chat_template(self, chat_history: list[dict], add_generation_prompt: bool = True) -> str:
        """Apply the chat template; without its system message if the template allows none, as lm_eval does."""
        how: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        how["continue_final_message"] = not add_generation_prompt
        try:
            return text.render_chat(self.tokenizer, chat_history, **how)
        except text.ChatError as e:
            rest = [m for m in chat_history if m["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
            logging.getLogger(__name__).warning("the chat template refused the system message (%s); left it out", e)
            return text.render_chat(self.tokenizer, rest, **how)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return a template, by its name or the usual one."""
        chosen = chat_template if isinstance(chat_template, str) else "default"
        return self.tokenizer.templates.get(chosen) if chat_template else None


def sampling_of(asked: Mapping[str, Any], seed: int) -> SamplingParams:
    """Translate a task's generation_kwargs. ValueError for a key that means nothing here."""
    from lm_eval.models.utils import normalize_gen_kwargs

    kwargs: dict[str, Any] = dict(normalize_gen_kwargs(dict(asked), 256))
    sample, until = kwargs.pop("do_sample", False), kwargs.pop("until", None) or []
    length, temperature = kwargs.pop("max_gen_toks"), kwargs.pop("temperature", 0.0)
    given = {k: v for k, v in kwargs.items() if v is not None}
    if unknown := given.keys() - set(SAMPLED):
        raise ValueError(f"generation_kwargs {sorted(unknown)} are not supported; {', '.join(SAMPLED)} are")
    return SamplingParams(
        max_tokens=length, temperature=temperature if sample else 0.0, seed=seed,
        stop=[s for s in until if s],
        **(given if sample else {k: v for k, v in given.items() if k.endswith("penalty")}),
    )  # fmt: skip
