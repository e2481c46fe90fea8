"""Adapters of an embedding that is the head too: PEFT has one for each (ensure_weight_tying), and here is one array."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .hf_layout import hf_names
from .peft_names import tensor_names
from .spec import Param
from .tensor import Tensor

# What a head that is the embedding is called, by what the embedding's name begins with. In models without a head
# (`models.heads`, kind "base") it begins otherwise, with what stands below these.
HEADS = {
    "roberta.": "lm_head.decoder", "rwkv.": "head", "model.tok_embeddings": "output", "thinker.": "thinker.lm_head",
    "language_model.model.": "language_model.lm_head",
    **dict.fromkeys(("model.", "transformer.", "backbone.", "gpt_neox."), "lm_head"),
}  # fmt: skip
ALIKE = (
    "embedding and head are one array here, so both need the same adapter, as PEFT makes with ensure_weight_tying=True"
)


def modules(declared: Mapping[str, Param], params: Any) -> tuple[str, str] | None:
    """Name the embedding and the head of params in which they are one array; None where they are two, or there is one."""
    inner, leaf = (params["model"], "model.embed") if "value" in params else (params, "embed")
    if leaf not in declared or "head" in inner:
        return None
    embedding = hf_names(declared[leaf])[0].removesuffix(".weight")
    known = HEADS if "encoder" not in inner else {"model.": "proj_out"}  # Whisper's
    return next(((embedding, head) for start, head in known.items() if embedding.startswith(start)), None)


def names(both: tuple[str, str]) -> list[str]:
    """Name the tensors of both adapters: the embedding's A and B, the head's, which are the transposes of B and A."""
    return [name for i, module in enumerate(both) for name in tensor_names(module, lambda _: False, i == 0)]


def take(
    both: tuple[str, str], files: dict[str, Tensor], scale: Callable[[str, int], float], problems: list[str]
) -> list[Tensor]:
    """Take the head's adapter out of `files`: the tensors of both, which `check` compares. Notes what is not alike."""
    found = {name: files[name] for name in names(both) if name in files}
    shapes = [t.shape for t in found.values()]
    alike = len(found) == 4 and shapes[2:] == [shape[::-1] for shape in shapes[1::-1]]
    if found and not (alike and scale(both[0], 1) == scale(both[1], 1)):
        problems.append(f"{', '.join(found)}: {ALIKE}")
    for name in names(both)[2:]:
        files.pop(name, None)
    return list(found.values())


def check(found: list[Tensor], problems: list[str]) -> None:
    """Read the tensors of both adapters and note if they are not alike."""
    arrays = [t.read() for t in found]
    if any(not np.array_equal(x, y.T) for x, y in zip(arrays[2:], arrays[1::-1], strict=True)):
        problems.append(ALIKE)
