"""Parameters: declared once by a spec tree; then initialised, sharded, loaded, saved, quantized and adapted from it."""

from . import lora, store
from .files import CheckpointError, Tensor, read, tensors
from .hf import load, save
from .hub import push, resolve
from .mesh import (
    AXES,
    SERVE,
    TRAIN,
    Rules,
    batch_sharding,
    joined,
    make_mesh,
    parse_mesh,
    partition_spec,
    reshard,
    shardings,
    shared,
)
from .peft import load_peft, save_peft
from .quantize import dequantize, quantize
from .spec import (
    Layout,
    Param,
    abstract,
    constant,
    count,
    hf_names,
    init,
    layers,
    layout,
    leaf_dtype,
    named_leaves,
    nbytes,
    normal,
    ones,
    parts,
    path_name,
    restack,
    runs,
    stack,
    unstack,
    zeros,
)

__all__ = [
    "AXES", "SERVE", "TRAIN", "CheckpointError", "Layout", "Param", "Rules", "Tensor", "abstract", "batch_sharding",
    "constant", "count", "dequantize", "hf_names", "init", "joined", "layers", "layout", "leaf_dtype", "load", "load_peft",
    "lora", "make_mesh", "named_leaves", "nbytes", "normal", "ones", "parse_mesh", "partition_spec", "parts", "path_name",
    "push", "quantize", "read", "reshard", "resolve", "restack", "runs", "save", "save_peft", "shardings", "shared",
    "stack", "store", "tensors", "unstack", "zeros",
]  # fmt: skip
