"""What the data pipeline gives: tokens per second and how full its rows are, beside transformers in a loop and TRL.

    python benchmarks/data.py [--megabytes 24] [--length 4096] [--trl PYTHON] [--out FILE.md]

Documents are the source files of Python's standard library, as JSON lines; the tokenizer is a byte-level BPE of 16384
tokens that is trained on a part of them. All sides read the same file and load the same tokenizer; each time is of one run,
in a process of its own, with imports and the loading of the tokenizer left out. `--trl` is a Python that has trl, datasets
and transformers; without it TRL is left out.
"""

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

BATCH = 16


def clock():
    """Seconds, and CPU seconds of this process."""
    import numpy as np

    return np.array([time.perf_counter(), time.process_time()])


def prepare(folder: Path, megabytes: float) -> None:
    from fdel import text

    documents, size = [], 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        said = file.read_text("utf-8", "replace") if "site-packages" not in file.parts else ""
        if said and size < megabytes * 1e6:
            documents.append(said)
            size += len(said)
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    text.save(text.train_bpe(documents[::16], 16384), folder / "tokenizer")


def fdel(folder: Path, length: int, packing: str, how: str) -> dict:
    import grain  # noqa: F401
    import pyarrow  # noqa: F401

    from fdel import text
    from fdel.train.data import Settings, Source, dataset

    tok = text.load(folder / "tokenizer")
    source = Source(str(folder / "documents.jsonl"))
    settings = Settings(batch=BATCH, length=length, packing=packing, stream=how == "stream", partial="pad")
    directory = folder / "cache" if how == "cached" else None
    if directory:
        dataset(source, settings, tok, cache_directory=directory)
    begin = clock()
    rows = [(b["packed"].segment_ids >= 0).sum(1) for b in dataset(source, settings, tok, cache_directory=directory)]
    spent = clock() - begin
    filled = [n for batch in rows for n in batch.tolist() if n]
    return {"tokens": sum(filled), "seconds": spent.tolist(), "fill": sum(filled) / len(filled) / length}


def tokenizers(folder: Path, *_: object) -> dict:
    """The tokenizer alone, on all documents at once and on all cores: no pipeline can be faster."""
    from fdel import text

    tok = text.load(folder / "tokenizer")
    documents = [json.loads(line)["text"] for line in open(folder / "documents.jsonl")]
    begin = clock()
    tokens = sum(len(e.ids) for e in tok.backend.encode_batch_fast(documents))
    return {"tokens": tokens, "seconds": (clock() - begin).tolist(), "fill": 0.0}


def loop(folder: Path, length: int, *_: str) -> dict:
    """Tokenize with transformers, put documents in order into rows while they fit, pad: a page of code by hand."""
    import numpy as np
    import transformers

    tok = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    begin = clock()
    rows, used = [], 0
    for line in open(folder / "documents.jsonl"):
        ids = tok(json.loads(line)["text"] + tok.eos_token).input_ids[:length]
        if not rows or used + len(ids) > length:
            rows.append([])
            used = 0
        rows[-1].append(ids)
        used += len(ids)
    tokens = 0
    for i in range(0, len(rows), BATCH):
        batch = np.zeros((BATCH, length), np.int32)
        for r, row in enumerate(rows[i : i + BATCH]):
            flat = [t for ids in row for t in ids]
            batch[r, : len(flat)] = flat
            tokens += len(flat)
    return {"tokens": tokens, "seconds": (clock() - begin).tolist(), "fill": tokens / len(rows) / length}


def trl(folder: Path, length: int, strategy: str, *_: str) -> dict:
    """What SFTTrainer does: map a tokenizer over the rows, pack them, read them back."""
    import transformers
    from datasets import load_dataset
    from trl import pack_dataset

    tok = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    begin = clock()
    data = load_dataset("json", data_files=str(folder / "documents.jsonl"), cache_dir=folder / strategy, split="train")
    data = data.map(lambda row: {"input_ids": tok(row["text"] + tok.eos_token).input_ids}, remove_columns=["text"])
    packed = pack_dataset(data, length, strategy).with_format("numpy")
    filled = [len(row) for batch in packed.iter(BATCH) for row in batch["input_ids"]]
    spent = clock() - begin
    return {"tokens": sum(filled), "seconds": spent.tolist(), "fill": sum(filled) / len(filled) / length}


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--megabytes", type=float, default=24)
    cli.add_argument("--length", type=int, default=4096)
    cli.add_argument("--trl", help="a Python that has trl")
    cli.add_argument("--out", type=Path, help="also write the table here")
    cli.add_argument("--side", nargs="+", help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.side:
        name, folder, *rest = args.side
        sides = {"fdel": fdel, "tokenizers": tokenizers, "loop": loop, "trl": trl}
        print(json.dumps(sides[name](Path(folder), args.length, *rest)))
        return
    packings = ("best_fit", "best_fit_split", "wrapped")
    runs = [("fdel", p, how) for how in ("memory", "stream", "cached") for p in packings] + [
        ("tokenizers", "", ""),
        ("loop", "", ""),
    ]
    runs += [("trl", p, "") for p in ("bfd", "bfd_split", "wrapped")] if args.trl else []
    lines = ["| | rows | tokens | s | CPU s | tokens/s | tokens/CPU s | fill |", "|---|" + 7 * "---|"]
    print("\n".join(lines))
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), args.megabytes)
        for name, packing, how in runs:
            python = args.trl if name == "trl" else sys.executable
            command = [python, __file__, "--length", str(args.length), "--side", name, folder, packing, how]
            ran = subprocess.run(command, capture_output=True, text=True)
            if ran.returncode:
                raise SystemExit(ran.stderr)
            r = json.loads(ran.stdout.splitlines()[-1])
            (wall, cpu), n = r["seconds"], r["tokens"]
            fill = f"{r['fill']:.4f}" if r["fill"] else ""
            label = {"fdel": f"fdel, {how}", "loop": "transformers, a loop", "trl": "TRL"}.get(name, name)
            cells = f"{n:,} | {wall:.2f} | {cpu:.2f} | {n / wall:,.0f} | {n / cpu:,.0f} | {fill}"
            lines.append(f"| {label} | {packing or ('in order' if fill else '')} | {cells} |")
            print(lines[-1], flush=True)
    table = "\n".join(lines) + "\n"
    if args.out:
        args.out.write_text(table)


if __name__ == "__main__":
    main()
