# ruff: noqa: F401 (exported)
"""Data for training: files become examples, examples batches; exact states, exact counts, packing, mixtures, streams.

    data = dataset(Source("chats/*.jsonl"), Settings(batch=32, length=4096, packing="best_fit"), tokenizer)
    it = iter(data)  # a grain iterator: next(it), it.get_state(), it.set_state(state)

Tokenized data is a `Store`; a `Plan` (the rows of an epoch) is a function of lengths, settings and seed, and so is each
batch of its number. A stream plans window by window.
"""

from fdel.train.data.batch import Plan, collate, plan, row
from fdel.train.data.encode import encode_rows
from fdel.train.data.files import File, Source, find
from fdel.train.data.finish import Example
from fdel.train.data.pipeline import Batches, Data, dataset, in_order, read_ahead, with_columns
from fdel.train.data.planning import best_fit, first_fit, interleave, order, pack
from fdel.train.data.prompts import Tasks, tasks
from fdel.train.data.settings import Report, Settings
from fdel.train.data.store import Store, build, cache, key
from fdel.train.data.tables import Table, open_table
