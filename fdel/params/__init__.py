"""Parameters: declared once by a spec tree; then initialised, sharded, loaded, saved, quantized and adapted from it."""

from . import lora, store
from .device_layout import laid
from .files import tensors
from .hf import load, save
from .hf_layout import hf_names, layout
from .hub import push, resolve
from .mesh import (
    AXES,
    SERVE,
    TRAIN,
    Rules,
    batch_sharding,
    make_mesh,
    parse_mesh,
    partition_spec,
    reshard,
    shardings,
    spread,
)
from .peft import load_peft, save_peft
from .quantize import dequantize, quantize, straight_through
from .spec import Param, abstract, count, init, layers, named_leaves, nbytes, normal, pformat, restack, stack, unstack
from .tensor import CheckpointError

# What researchers call; the other names here are for the rest of fdel.
__all__ = (
    "CheckpointError Param SERVE TRAIN abstract batch_sharding count dequantize init layers load load_peft lora make_mesh "
    "nbytes normal pformat push quantize resolve save save_peft shardings spread stack store straight_through unstack"
).split()
