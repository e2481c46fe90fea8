"""A tokenizer with a training template, for us and for transformers, and files of rows."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers

from fdel import text

WORDS = "the cat sat on a mat and saw that it was good , so what is 2 + 2 ? four it is ; Ünïcödé é".split()
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>tools' + (tools | tojson) + '<|im_end|>' }}{% endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{- m.content + '<|im_end|>' }}{% endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer's folder: byte-level BPE that puts a bos in front, with a chat template that marks generations."""
    made = text.train_bpe([" ".join(WORDS)] * 3, 330, ["<s>", "<|im_start|>", "<|im_end|>"])
    bos = ("<s>", made.backend.token_to_id("<s>"))
    made.backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [bos])
    special = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    saved = dataclasses.replace(made, special=special, templates={"default": TEMPLATE}, json=made.backend.to_str())
    path = tmp_path_factory.mktemp("tokenizer")
    text.save(saved, path)
    return path


@pytest.fixture(scope="session")
def tok(folder: Path) -> text.Tokenizer:
    """Our tokenizer."""
    return text.load(folder)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Sequence[object]], str]:
    """Write rows as JSON lines; a str is written as it is."""

    def write(name: str, rows: Sequence[object]) -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("\n".join(lines) + "\n", "utf-8")
        return str(tmp_path / name)

    return write
