"""Run files drawn at random: each trains a tiny model, loses its last checkpoint, and must repeat its metrics. CPU.

    python benchmarks/recipes.py [--runs 50] [--seed 0] [--devices 1] [--families llama,qwen3_moe] [--half]

Trainer types that learn from fixed data, losses, optimizers, data and meshes are combined as no list of examples does
it. A run file that `faults` refuses counts as refused. What else fails is printed with all its keys, as is a metric that
is not finite, or that differs in the run that went on; the exit code is then 1. `--half` draws bfloat16 too. Needs the
extra `test`, for the tiny models.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = "llama", "qwen3", "gemma3_text", "mixtral", "qwen3_moe", "deepseek_v3", "qwen3_next", "mamba2", "gpt2"
WORDS = "the cat sat on a mat and saw that it was good , so what is 2 + 2 ? four it is".split()
VOCAB = 320
SOME = 0.25  # how often a key is given where the trainer reads it

TRAINER: dict[str, tuple] = {
    "gradient_accumulation_steps": (2, 4), "warmup_steps": (1,), "weight_decay": (0.1,), "clip_grad": (None, 0.5),
    "ema_decay": (0.9,), "skip_nonfinite": (False,), "num_train_epochs": (2,), "eval_batch_size": (4,), "z_loss": (1e-3,),
    "gradient_checkpointing": (True, "dots_saveable", "save_only_these_names:attn_output"), "evaluation_steps": (2,),
    "lora": ({"r": 2}, {"r": 2, "use_rslora": True, "merge": True}), "packing": (True,), "completion_only_loss": (False,),
    "packing_strategy": ("bfd_split", "wrapped"), "precompute_ref_log_probs": (True,), "sync_ref_model": (True,),
    "ref_model_sync_steps": (2,), "ld_alpha": (0.5,), "use_weighting": (True,), "center_rewards_coefficient": (0.01,),
    "f_divergence_type": ("js_divergence", "alpha_divergence"), "hidden_state_loss_weight": (0.1,),
    "attention_loss_weight": (0.1,), "pooling": ("mean",), "matryoshka_dims": ([32, 16],), "negatives": (0, 2),
    "train_on_last_step_only": (True,), "moments": ("bfloat16", "int8"), "weighting": ("elbo",),
}  # fmt: skip
LOSSES: dict[str, tuple] = {
    "sft": ("dft",), "cpo": ("hinge", "ipo", "simpo"), "kto": ("apo_zero_unpaired",), "embedding": ("triplet",),
    "dpo": ("hinge", "ipo", "aot", "sigmoid_norm", "apo_zero", "apo_down", "robust", "exo_pair", "nca_pair", "bco_pair",
            "sppo_hard", "discopop", "aot_unpaired", ["sigmoid", "sft"]),
}  # fmt: skip
MIXTURE: dict[str, tuple] = {
    "shuffle_buffer_size": (0, 5), "pack_on_the_fly": (True,), "stop_strategy": ("longest",),
}  # fmt: skip


class Draw:
    """What run files are drawn from: a random generator, models and data under `root`."""

    def __init__(self, root: Path, rng: random.Random, families: list[str], devices: int, half: bool) -> None:
        self.root, self.rng, self.families, self.devices, self.half = root, rng, families, devices, half
        for family in families:
            self._models(family)
        for part, count in (("a", 24), ("b", 12), ("held", 7)):
            for kind in ("text", "completion", "pairs", "rated", "steps", "embedding", "labels", "words", "answers"):
                rows = [json.dumps(self._row(kind, i)) + "\n" for i in range(count)]
                (root / f"{kind}-{part}.jsonl").write_text("".join(rows))

    def _models(self, family: str) -> None:
        """Write two models of a family, with a tokenizer."""
        from fdel import text
        from tests.models import tiny

        entry = tiny.TINY[family]
        tiny.TINY["drawn"] = entry._replace(values=entry.values | {"vocab_size": VOCAB})
        for seed in (0, 1):
            tiny.checkpoint("drawn", self.root / f"{family}-{seed}", seed)
            text.save(text.train_bpe([" ".join(WORDS)], 300), self.root / f"{family}-{seed}")

    def _words(self, count: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=count))

    def _row(self, kind: str, i: int) -> dict[str, Any]:
        said = self._words
        if kind == "text":
            return {"text": said(3 + i % 9)}
        if kind == "embedding":
            return {"query": said(2), "positive": said(3), "negative": said(2) if i % 2 else None}
        if kind == "steps":
            return {"prompt": said(2), "completions": [said(2), said(1)], "labels": [i % 2 > 0, i % 3 > 0]}
        if kind == "answers":
            context, answer = said(1 + i % 4) + " ", said(1 + i % 2)
            marked = {"text": [answer], "answer_start": [len(context)]}
            return {"question": said(2), "context": context + answer, "answers": marked}
        if kind == "labels":
            return {"text": said(3 + i % 5), "label": i % 2}
        if kind == "words":
            return {"tokens": (words := said(2 + i % 5).split()), "labels": [int(len(w) > 2) for w in words]}
        if kind == "pairs":
            return {"prompt": said(3), "chosen": " " + said(1 + i % 4), "rejected": " " + said(2 + i % 3)}
        return {"prompt": said(3), "completion": " " + said(1 + i % 6)} | (
            {"label": i % 3 > 0} if kind == "rated" else {}
        )

    def _some(self, keys: dict[str, tuple], share: float = SOME) -> dict[str, Any]:
        return {key: self.rng.choice(values) for key, values in keys.items() if self.rng.random() < share}

    def recipe(self, out: Path) -> dict[str, Any]:
        """Draw the sections of a run file."""
        from fdel import train
        from fdel.recipe import methods
        from fdel.recipe import trainer as known

        offline = [m for m in methods.types(samples=False) if m != "masked_lm"]  # of encoders; others need rewards
        rng, family, kind = self.rng, self.rng.choice(self.families), self.rng.choice(offline)
        by = {f.name: f.metadata["by"] for f in dataclasses.fields(known.Trainer)}
        t = {k: v for k, v in self._some(TRAINER).items() if not by[k] or kind in by[k]}
        t |= self._some({"loss_type": LOSSES.get(kind, ())} if kind in LOSSES else {}, 0.6)
        t |= {"trainer_type": kind, "max_training_steps": 4, "total_batch_size": 8, "max_length": rng.choice([16, 24])}
        t |= {
            "optimizer": rng.choice(["adamw", *train.optim.OPTIMIZERS]),
            "scheduler": rng.choice(list(train.schedules.SCHEDULES)),
        }
        t |= {"learning_rate": 1e-2, "log_steps": 1, "save_steps": 2, "save_directory": str(out)}
        if t["optimizer"] != "adamw":
            t.pop("moments", None)
        t |= {"mask_token_id": VOCAB - 1} if kind in ("diffusion", "masked_lm") else {}
        data = {"reward": "pairs", "prm": "steps", "embedding": "embedding", "kto": "rated", "bco": "rated",
                "classification": "labels", "token_classification": "words",
                "question_answering": "answers"}.get(kind)  # fmt: skip
        t |= {"labels": ["short", "long"]} if data in ("labels", "words") else {}
        data = data or ("pairs" if kind in ("dpo", "cpo", "simpo", "orpo") else rng.choice(["text", "completion"]))
        mixture = self._some(MIXTURE)
        mixture["informs"] = [{"data_files": str(self.root / f"{data}-{x}.jsonl"), "name": x} for x in "ab"]
        if rng.random() < 0.5:
            mixture["informs"] = mixture["informs"][:1]
        elif rng.random() < 0.5:
            mixture |= {"mixture_weights": {"a": 1, "b": 2}} | self._some({"mixture_block_size": (8,)})
        if "evaluation_steps" in t:
            mixture["eval_informs"] = [{"data_files": str(self.root / f"{data}-held.jsonl")}]
            t |= self._some({"metric_for_best_model": ("eval_loss",)})
        for idle, needs in (("ref_model_sync_steps", "sync_ref_model"), ("packing_strategy", "packing"),
                            ("eval_batch_size", "evaluation_steps")):  # fmt: skip
            if needs not in t:  # nothing would read it, which is an error
                t.pop(idle, None)
        if "mixture_weights" not in mixture:
            mixture.pop("stop_strategy", None)
        sections: dict[str, Any] = {"model": {"name_or_path": str(self.root / f"{family}-0")}, "trainer": t}
        sections |= {"mixture": mixture, "sharding": {"axis_dims": self._mesh()}}
        other = {"name_or_path": str(self.root / f"{family}-1")}
        if kind in methods.types(teacher=True):
            sections["teacher_model"] = other
        if kind in methods.types(reference=True) and rng.random() < 0.5:
            sections["reference_model"] = other
        if "lora" in t and rng.random() < 0.5:
            sections["quantization"] = {"model": {"quantization_method": rng.choice(["nf4", "8bit"])}}
        if self.half:
            sections["loader"] = self._some({"dtype": ("bf16",), "param_dtype": ("bf16",)}, 0.4)
        return sections

    def _mesh(self) -> list[int]:
        sizes = [1] * 5
        for _ in range(self.devices.bit_length() - 1):
            sizes[self.rng.randrange(5)] *= 2
        return sizes


def tried(sections: dict[str, Any]) -> str:
    """Train as the sections say, twice; "repeats", "refused", or what went wrong."""
    from fdel import recipe
    from fdel.train import metrics

    wanted = recipe.from_dict(sections)
    if recipe.faults(wanted):
        return "refused"
    out = Path(wanted.trainer.save_directory)
    again = out.with_name(f"{out.name}-again")
    curve = lambda path: [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in metrics.read(path)]
    try:
        recipe.train(wanted)
        shutil.copytree(out, again)
        saved = sorted((p for p in (again / "checkpoints").iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
        shutil.rmtree(saved[-1])
        recipe.train(wanted.set("trainer.save_directory", str(again)))
    except (recipe.RecipeError, ValueError) as e:
        fits = any(s in str(e) for s in ("cannot be divided among", "cannot shard", "not divisible"))
        return "refused" if fits else f"{type(e).__name__}: {e}"
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    rows, others = curve(out), curve(again)
    infinite = sorted({k for row in rows for k, v in row.items() if isinstance(v, float) and v - v != 0})
    if infinite:
        return f"not finite: {', '.join(infinite)}"
    return "repeats" if rows == others else f"another curve: {others[-1]} instead of {rows[-1]}"


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--runs", type=int, default=50)
    cli.add_argument("--seed", type=int, default=0)
    cli.add_argument("--devices", type=int, default=1)
    cli.add_argument("--families", default=",".join(FAMILIES))
    cli.add_argument("--half", action="store_true")
    args = cli.parse_args()
    if args.devices.bit_count() != 1:
        cli.error(f"--devices {args.devices}: expected a power of 2")
    import jax

    jax.config.update("jax_num_cpu_devices", args.devices)
    sys.path.insert(0, str(ROOT))
    counts: Counter = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stderr(io.StringIO()):
            draw = Draw(Path(folder), random.Random(args.seed), args.families.split(","), args.devices, args.half)
        for i in range(args.runs):
            sections = draw.recipe(Path(folder) / f"run-{i}")
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                found = tried(sections)
            fine = found in ("repeats", "refused")
            counts[found if fine else "FAILED"] += 1
            print(f"{i}: {sections['trainer']['trainer_type']}: {found}", flush=True)
            if not fine:
                print(json.dumps(sections), flush=True)
    print(", ".join(f"{n} {name}" for name, n in counts.items()))
    sys.exit(bool(counts["FAILED"]))


if __name__ == "__main__":
    main()
