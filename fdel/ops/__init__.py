"""Operations: plain functions over arrays, each one the specification of its formula."""

import inspect

from fdel.ops import diffusion
from fdel.ops.attention import alibi_slopes, attend, attend_slot
from fdel.ops.batch import (
    Batch,
    Media,
    Packed,
    Paged,
    Pages,
    Patches,
    Place,
    Routing,
    Slots,
    Sounds,
    State,
    look_ahead,
    pack,
    packed,
    paged,
)
from fdel.ops.carry import (
    AttentionWeights,
    Carry,
    HiddenStates,
    RouterLoad,
    Taps,
    attention_weights,
    load_balancing,
    router_load,
    watch_router,
)
from fdel.ops.conv import causal_conv
from fdel.ops.delta import gated_delta_rule, l2norm
from fdel.ops.dispatch import Implementation, explain, use
from fdel.ops.einsum import einsum
from fdel.ops.embed import embed, entries, place
from fdel.ops.glu import ACTIVATIONS, glu, linear, mlp
from fdel.ops.grouped import grouped_glu, grouped_matmul
from fdel.ops.head import Head, logits
from fdel.ops.layers import layers, pool_index, rematerialising, tracing_once
from fdel.ops.mask import Mask
from fdel.ops.mla import mla
from fdel.ops.moe import moe
from fdel.ops.norm import layer_norm, rms_norm
from fdel.ops.rope import Rope, components, cos_sin, rope, rope_interleaved, rotation, yarn_mscale
from fdel.ops.route import route_sigmoid, route_softmax, route_sparsemixer
from fdel.ops.route_capacity import (
    Tallied,
    expert_capacity,
    jittered,
    limited,
    route_expert_choice,
    route_switch,
    router_jitter,
    router_metrics,
    router_z_loss,
    tally,
    update_router_bias,
)
from fdel.ops.sparse import Chosen, choose_keys, none_chosen, sparse_mla
from fdel.ops.ssm import selective_scan, ssd
from fdel.ops.wkv import token_shift, wkv

__all__ = [name for name, x in globals().items() if name[0] != "_" and not inspect.ismodule(x)]
