"""Operations: plain functions over arrays, each one the specification of its formula."""

from fdel.ops.attention import attend, explain
from fdel.ops.balance import RouterLoad, load_balancing, router_load, watch_router
from fdel.ops.batch import Batch, Packed, Paged, Pages, Slots, State, pack, packed, paged
from fdel.ops.conv import causal_conv
from fdel.ops.delta import gated_delta_rule, l2norm
from fdel.ops.dense import dense_attention
from fdel.ops.einsum import einsum
from fdel.ops.embed import embed
from fdel.ops.flash import flash_attention
from fdel.ops.glu import ACTIVATIONS, glu, linear, mlp
from fdel.ops.head import Head, logits
from fdel.ops.layers import layers, pool, pool_index, with_pool
from fdel.ops.mamba1 import selective_scan
from fdel.ops.mask import Mask
from fdel.ops.mla import mla
from fdel.ops.moe import grouped_matmul, moe, route_sigmoid, route_softmax
from fdel.ops.norm import layer_norm, rms_norm
from fdel.ops.rope import Rope, rope, rope_interleaved, rotation, yarn_mscale
from fdel.ops.ssd import ssd
from fdel.ops.watch import AttentionWeights, HiddenStates, attention_weights

__all__ = [
    "ACTIVATIONS",
    "AttentionWeights",
    "Batch",
    "Head",
    "HiddenStates",
    "Mask",
    "Packed",
    "Paged",
    "Pages",
    "Rope",
    "RouterLoad",
    "Slots",
    "State",
    "attend",
    "attention_weights",
    "causal_conv",
    "dense_attention",
    "einsum",
    "embed",
    "explain",
    "flash_attention",
    "gated_delta_rule",
    "glu",
    "grouped_matmul",
    "l2norm",
    "layer_norm",
    "layers",
    "linear",
    "load_balancing",
    "logits",
    "mla",
    "mlp",
    "moe",
    "pack",
    "packed",
    "paged",
    "pool",
    "pool_index",
    "rms_norm",
    "rope",
    "rope_interleaved",
    "rotation",
    "route_sigmoid",
    "route_softmax",
    "router_load",
    "selective_scan",
    "ssd",
    "watch_router",
    "yarn_mscale",
    "with_pool",
]
