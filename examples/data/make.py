"""Write the examples' data from Python's own documentation (PSF License): python examples/data/make.py

Results differ by Python's version. In pairs.jsonl, the rejected answer belongs to another function, and hedges.
"""

import inspect
import json
import re
from pathlib import Path
from pydoc_data.topics import topics

HERE = Path(__file__).parent
TYPES = (str, bytes, list, dict, set, tuple, int, float)
OWNERS = ("str", "math", "statistics")
QUOTED = r'[^"]*( "\w[^"]*"( [^"]*)?)+'  # quotes around whole words
MODULES = ("math", "itertools", "functools", "os.path", "statistics", "textwrap", "random", "heapq", "operator")


def described() -> dict[str, str]:
    """Map functions and methods to the first sentence of their documentation."""
    import builtins
    import importlib

    owners = [("", builtins), *((t.__name__ + ".", t) for t in TYPES)]
    owners += [(name + ".", importlib.import_module(name)) for name in MODULES]
    found = {}
    for prefix, owner in owners:
        for name in sorted(vars(owner)):
            value = getattr(owner, name)
            if name.startswith("_") or inspect.isclass(value) or not callable(value):
                continue
            text = re.sub(r"\s+", " ", (inspect.getdoc(value) or "").split("\n\n")[0])
            if 20 < len(text) < 160 and "->" not in text and text not in found.values():
                found[prefix + name] = text
    return found


def write(name: str, rows: list[dict]) -> None:
    """Write rows as JSON lines."""
    (HERE / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def main() -> None:
    """Write text.jsonl (paragraphs), chat.jsonl (questions), pairs.jsonl (right, wrong answers), steps.jsonl (judged).

    Then labels.jsonl (to which type or module a sentence belongs), words.jsonl (which words are code), and
    answers.jsonl (which of two sentences answers a question).
    """
    paragraphs = [re.sub(r"\s+", " ", p).strip() for name in sorted(topics) for p in topics[name].split("\n\n")]
    write("text.jsonl", [{"text": p} for p in paragraphs if 200 < len(p) < 600][::7])
    answers = dict(list(described().items())[::2])
    names, texts = list(answers), list(answers.values())
    ask = lambda name: f"What does Python's {name}() do?"
    turn = lambda role, content: [{"role": role, "content": content}]
    write(
        "chat.jsonl", [{"prompt": turn("user", ask(n)), "completion": turn("assistant", t)} for n, t in answers.items()]
    )
    wrong = texts[len(texts) // 2 :] + texts[: len(texts) // 2]
    pairs = [
        {"prompt": ask(n) + "\n", "chosen": t, "rejected": f"I am not sure, maybe it does this: {w}"}
        for n, t, w in zip(names, texts, wrong, strict=True)
    ]
    write("pairs.jsonl", pairs)
    write("steps.jsonl", [judged(row, i % 2) for i, row in enumerate(pairs[::5])])
    owned = [{"text": t, "label": n.partition(".")[0]} for n, t in described().items() if n.partition(".")[0] in OWNERS]
    write("labels.jsonl", owned[::2])
    told = [p for p in paragraphs if 60 < len(p) < 200 and 2 < p.count('"') < 12 and re.fullmatch(QUOTED, p)]
    write("words.jsonl", [marked(p) for p in told[::6]])
    short = [(n, t) for n, t in described().items() if len(t) < 50 and n.partition(".")[0] in OWNERS]
    write("answers.jsonl", [answered(short[i : i + 2], i // 2 % 2) for i in range(0, len(short) - 1, 2)])


def marked(paragraph: str) -> dict:
    """Make words with labels of a paragraph: code is what stands in quotes, which are left out."""
    parts = [(i % 2, word) for i, part in enumerate(paragraph.split('"')) for word in part.split()]
    return {"tokens": [word for _, word in parts], "labels": ["CODE" if quoted else "O" for quoted, _ in parts]}


def answered(functions: list[tuple[str, str]], which: int) -> dict:
    """Make a question about one of two functions; the answer stands in the text that describes both, as in SQuAD."""
    name, answer = functions[which]
    context = " ".join(f"{n}(): {t}" for n, t in functions)
    start = context.index(f"{name}(): {answer}") + len(f"{name}(): ")
    return {
        "question": f"What does {name}() do?",
        "context": context,
        "answers": {"text": [answer], "answer_start": [start]},
    }


def judged(row: dict, turned: int) -> dict:
    """Make two steps of a pair, the right one first or last."""
    steps = [(row["chosen"], True), (row["rejected"], False)][:: 1 - 2 * turned]
    return {"prompt": row["prompt"], "completions": [s for s, _ in steps], "labels": [y for _, y in steps]}


if __name__ == "__main__":
    main()
