"""The programs that are compiled for accelerators: every family at toy size, and a Llama of 1.2 billion parameters."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from tiny import TINY

from fdel import aot, models, ops, params, plan, train
from fdel.ops import platform

FAMILIES = [name for name in TINY if ":" not in name]
SEEING = [name for name in FAMILIES if hasattr(models.family(name), "encode")]
LARGE = dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
             num_key_value_heads=8, max_position_embeddings=8192, tie_word_embeddings=True)  # fmt: skip
TARGETS = {"v5p": ("v5p:1x1x1", "v5p:2x2x2"), "v6e": ("v6e:1x1", "v6e:2x4"), "h100": ("h100:1x1x1", "h100:1x1x8")}
WIDE = LARGE | dict(num_attention_heads=16, head_dim=128)
# Latent attention with DeepSeek-V3's heads and channels, in few layers with few experts.
NARROW = dict(vocab_size=32768, hidden_size=2048, intermediate_size=4096, moe_intermediate_size=512, num_hidden_layers=4,
              first_k_dense_replace=2, num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536,
              kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=8, n_group=1,
              topk_group=1, num_experts_per_tok=2, n_shared_experts=1, max_position_embeddings=8192)  # fmt: skip
# Recurrences with the sizes of published heads: Mamba 2.8B, Mamba-2 2.7B, Qwen3-Next 80B, Kimi Linear 48B; no experts.
SCANS = dict(vocab_size=50288, hidden_size=2560, expand=2, num_hidden_layers=4, conv_kernel=4, use_bias=False,
             use_conv_bias=True, tie_word_embeddings=True)  # fmt: skip
NEXT = dict(vocab_size=32768, hidden_size=2048, num_hidden_layers=4, intermediate_size=5120, num_attention_heads=16,
            num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
            linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, num_experts=8,
            num_experts_per_tok=2, moe_intermediate_size=512, shared_expert_intermediate_size=512,
            mlp_only_layers=[0, 1, 2, 3], full_attention_interval=4, max_position_embeddings=8192)  # fmt: skip
KIMI = dict(vocab_size=32768, hidden_size=2304, num_hidden_layers=4, intermediate_size=9216, num_attention_heads=32,
            num_key_value_heads=32, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
            v_head_dim=128, linear_head_dim=128, linear_num_heads=32, num_local_experts=8, num_experts_per_tok=2,
            moe_intermediate_size=1024, layer_types=["linear_attention"] * 3 + ["full_attention"],
            mlp_layer_types=["dense"] * 4, max_position_embeddings=8192)  # fmt: skip
# Heads of 64, two in a row of a TPU's cache, as GPT-OSS has them: with tp=8 a row is of two devices.
OSS = dict(vocab_size=32768, hidden_size=2880, intermediate_size=2880, num_hidden_layers=2, num_attention_heads=64,
           num_key_value_heads=8, head_dim=64, num_local_experts=8, num_experts_per_tok=4, sliding_window=128,
           layer_types=["sliding_attention", "full_attention"], max_position_embeddings=8192)  # fmt: skip
# Heads of 96, which fill no row of a TPU's cache (Phi-3 mini), and 10 key heads, whose scales fill no tile (Phi-4).
PHI = dict(vocab_size=32768, hidden_size=3072, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=32,
           num_key_value_heads=32, max_position_embeddings=8192)  # fmt: skip
TEN = PHI | dict(hidden_size=5120, intermediate_size=17920, num_attention_heads=40, num_key_value_heads=10)
RECURRENT = {"mamba-4-layers": SCANS | dict(state_size=16, intermediate_size=5120, time_step_rank=160),
             "mamba2-4-layers": SCANS | dict(state_size=128, num_heads=80, head_dim=64, n_groups=1, chunk_size=256),
             "qwen3_next-4-layers": NEXT, "kimi_linear-4-layers": KIMI}  # fmt: skip
MODELS = RECURRENT | {"llama-1b": LARGE, "llama-1b-h128": WIDE, "llama-24-layers": WIDE | dict(num_hidden_layers=24),
          "deepseek_v3-narrow": NARROW, "gpt_oss-2-layers": OSS, "phi3-heads-of-96": PHI,
          "phi3-10-heads": TEN}  # fmt: skip
# Sizes that kernels take, for the toys ("llama-wide"): heads of 128, and matrices of multiples of 128.
WIDENED = {"hidden_size": 512, "n_embd": 512, "d_model": 512, "num_attention_heads": 4, "n_head": 4, "n_heads": 4,
           "num_key_value_heads": 2, "intermediate_size": 1024, "moe_intermediate_size": 256, "head_dim": 128,
           "kv_lora_rank": 256, "q_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
           "v_head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_head_dim": 128,
           "index_head_dim": 128, "state_size": 128, "mamba_d_state": 128, "mamba_d_head": 128,
           "mamba_d_ssm": 768}  # fmt: skip
LATENT = ("kv_lora_rank", "kv_lora_dim", "qk_nope_head_dim")
HLO = r"= \(?(\w+)\[([\d,]*)\]\S* ([a-z\-]+)\("  # dtype, sizes, operation


def target(chip: str, devices: int) -> aot.Target:
    """One device or eight."""
    return aot.parse_target(TARGETS[chip][devices > 1])


def widened(values: dict[str, Any]) -> dict[str, Any]:
    """Give a toy's language model the sizes of `WIDENED`."""
    out = {k: WIDENED[k] if k in WIDENED and v else v for k, v in values.items()}
    if "kv_lora_rank" in values and "num_key_value_heads" in values:
        out["num_key_value_heads"] = out["num_attention_heads"]
    if "time_step_rank" in values:
        out["state_size"] = 16  # a selective scan's, as published: its gradient is a kernel for so few alone
    inner = {k: widened(v) for k, v in values.items() if k in ("text_config", "thinker_config")}
    for key, size in (
        ("vision_config", "out_hidden_size"),
        ("vision_config", "embed_dim"),
        ("audio_config", "output_dim"),
    ):
        if size in (part := values.get(key, {})):  # what a tower gives are states of the language model
            inner[key] = part | {"hidden_size" if size == "embed_dim" else size: WIDENED["hidden_size"]}
    turned = out.get("rope_parameters")
    if isinstance(turned, dict) and (sections := turned.get("mrope_section")):
        head = out.get("head_dim", out["hidden_size"] // out["num_attention_heads"])
        pairs = int(head * turned.get("partial_rotary_factor", 1)) // 2
        rest = [n * pairs // sum(sections) for n in sections[1:]]
        out["rope_parameters"] = turned | {"mrope_section": [pairs - sum(rest), *rest]}
    return out | inner


def tiled(values: dict[str, Any]) -> dict[str, Any]:
    """Give a toy's latents, and what is not rotated of its heads, 24 channels."""
    return {k: tiled(v) if k == "text_config" else 24 if k in LATENT else v for k, v in values.items()}


@cache
def model(name: str) -> tuple[Any, Any]:
    """Give a family and a Config; toy models are those of the suite, `tiny.TINY`, of wider sizes if their name says so."""
    base, _, wide = name.partition("-")
    family = models.family(base)
    values = MODELS[name] if name in MODELS else TINY[base].values
    if wide == "wide":
        return family, family.Config.from_hf(widened(values) | {"model_type": family.MODEL_TYPE})
    # XLA:GPU finds no tiles, which have 16 rows at least, for gradients of 20 channels a head, or 16 latent and 8
    # rotary; nor of 24 channels in Gemma 2's layers, and Gemma 3's.
    values = values if name in MODELS else tiled(values)
    values |= {"head_dim": 32} if name == "gemma2" else {}
    if name == "gemma3":
        values["text_config"] = values["text_config"] | {"head_dim": 32}
    return family, family.Config.from_hf(values | {"model_type": family.MODEL_TYPE})


@cache
def compiled(name: str, what: str, chip: str, devices: int, mesh: str = "", **chosen: str) -> tuple[aot.Compiled, int]:
    """Compile "train", "decode", "prefill", "forward" or "see" (gradients of rows with images) of a model, once.

    Rows are divided, but for an engine's of large models, where no other mesh is named for training or serving.
    `chosen` names implementations, as `ops.use` does. (program, bytes of its cache on all devices)
    """
    if chosen:
        with ops.use(**chosen):
            return compiled.__wrapped__(name, what, chip, devices, mesh)
    (family, cfg), on = model(name), target(chip, devices)
    if what == "forward":
        mesh = params.make_mesh({"fsdp": devices}, aot.devices(on))
        put = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
        with platform.tracing_for(on.facts.platform):
            spec = family.spec(cfg)
            weights = params.abstract(spec, jnp.bfloat16)
        weights = jax.tree.map(put, weights, params.shardings(spec, mesh, params.TRAIN))
        tokens = jax.ShapeDtypeStruct((8, 64), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
        program = jax.jit(lambda weights, tokens: family.forward(weights, tokens, cfg)[0])
        return aot.compile(on, program, weights, tokens, mesh=mesh), 0
    if what == "see":
        mesh = params.make_mesh({"fsdp": devices}, aot.devices(on))
        put = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
        with platform.tracing_for(on.facts.platform):
            spec = family.spec(cfg)
            weights = jax.tree.map(put, params.abstract(spec, jnp.bfloat16), params.shardings(spec, mesh, params.TRAIN))
            rows = jax.tree.map(lambda x: put(x, params.batch_sharding(mesh)), looking(cfg, 8, 64))
            program = jax.jit(train.normalize(train.grads(train.losses.sft(family, cfg, remat="nothing_saveable"))))
        return aot.compile(on, program, weights, rows, mesh=mesh), 0
    if what == "hand-over":
        return aot.hand_over(on, family, cfg, f"fsdp={devices}", f"tp={devices}"), 0
    if what == "train":
        rows, length = (16, 4096) if name in MODELS else (8, 256 if name.endswith("-wide") else 64)
        t = plan.Training(mesh or f"fsdp={devices}", rows, length, remat="nothing_saveable")
        return aot.train_step(on, family, cfg, t), 0
    rows, length = (64, 1024) if name in MODELS else (8, 128)
    mesh = mesh or ("tp=8" if devices > 1 and name in MODELS else f"fsdp={devices}")
    return aot.serving(on, family, cfg, aot.Serving(mesh, rows, length), what)


def row(
    record: Callable, name: str, what: str, chip: str, devices: int, mesh: str = "", **chosen: str
) -> tuple[aot.Compiled, int]:
    """Compile a program and note its row of the table."""
    return note(record, name, what, chip, mesh or devices, *compiled(name, what, chip, devices, mesh, **chosen))


def note(
    record: Callable, name: str, what: str, chip: str, devices: int | str, c: aot.Compiled, cache: int
) -> tuple[aot.Compiled, int]:
    """Write down what a program came to."""
    sent = plan.collectives(c.text, narrow=False)
    kinds = Counter[str]()
    for x in sent:
        kinds[" ".join([x.kind, *sorted({s.partition("[")[0] for s in x.shapes})])] += x.count
    record("program", [name, what, f"{chip} x {devices}", f"{c.seconds:.0f}", f"{c.arguments / 2**20:,.1f}",
           f"{c.temporaries / 2**20:,.1f}", c.loops, f"{sum(x.moved for x in sent) / 2**20:,.2f}",
           " ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())),
           "" if c.estimate is None else f"{c.estimate * 1e3:.3f}"])  # fmt: skip
    return c, cache


def looking(cfg: Any, rows: int, length: int) -> dict[str, Any]:
    """Shapes of a training batch whose rows show an image each, and a sound of two chunks where the model hears."""
    ints, floats = (lambda *shape, kind=kind: jax.ShapeDtypeStruct(shape, kind) for kind in (jnp.int32, jnp.float32))
    v = cfg.vision
    patches = (getattr(v, "image", 4 * v.patch) // v.patch) ** 2
    numbers = 3 * v.patch**2 * getattr(v, "frames", 1)
    seen: Any = ops.Patches(floats(rows, 1, patches, numbers), ints(rows, 1, patches, 3))
    if audio := getattr(cfg, "audio", None):
        seen = seen, ops.Sounds(floats(rows, 1, 2, audio.bins, audio.frames), ints(rows, 1, 2))
    return {"tokens": ints(rows, length), "lengths": ints(rows), "media": ops.Media(ints(rows, length), inputs=seen)}


@cache
def read_once(name: str, chip: str) -> tuple[aot.Compiled, int]:
    """Compile the model's part of a decode step, without sampling: 64 rows of 512 tokens, which one product attends to.

    So no loop hides what the compiler counts: (program, bytes of the cache).
    """
    (family, cfg), on = model(name), target(chip, 1)
    mesh = params.make_mesh({}, aot.devices(on))
    put = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    ints = lambda *shape: put(jax.ShapeDtypeStruct(shape, jnp.int32))
    with platform.tracing_for(on.facts.platform):
        weights = params.abstract(params.unstack(family.spec(cfg)), jnp.bfloat16)
        state = params.abstract(family.state_spec(cfg, pages=64 * 8, page=64, rows=64), jnp.bfloat16)

    def step(weights, tokens, batch, state):
        x, state, _ = family.hidden(weights, tokens, cfg, batch, state)
        return ops.logits(x, family.head(weights, cfg)), state

    args = (
        jax.tree.map(put, weights),
        ints(64),
        ops.Paged(ints(64), ints(64, 8), ints(64), 1),
        jax.tree.map(put, state),
    )
    program = jax.jit(ops.tracing_once()(step), donate_argnums=3)
    return aot.compile(on, program, *args, mesh=mesh), params.nbytes(
        family.state_spec(cfg, pages=512, page=64), "bfloat16"
    )


def operations(text: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Walk a compiled program: (dtype, sizes, operation)."""
    for kind, sizes, name in re.findall(HLO, text):
        yield kind, tuple(int(n) for n in sizes.split(",") if n), name


def _in_memory(text: str) -> str:
    """Leave out fusions inside of fusions: what those give, a copy for one, is an operand on its way, never in memory."""
    bodies, _ = plan._computations(text)
    called = {name: set(re.findall(r" fusion\(.*calls=%?([\w.\-]+)", "\n".join(body))) for name, body in bodies.items()}
    inner = {callee for name in set().union(*called.values()) for callee in called[name]}
    return "\n".join(line for name, body in bodies.items() if name not in inner for line in body)


def copies(text: str, least: int) -> int:
    """Count what copies or transposes an array of at least so many numbers; fetching it to fast memory is no copy."""
    found = operations(_in_memory(text))
    return sum(name in ("copy", "transpose") and _count(sizes) >= least for _, sizes, name in found)


def transposes(text: str, name: str) -> int:
    """Count what copies or transposes an array of a weight's sizes, in whatever order."""
    weights = {tuple(sorted(p.shape)) for p in jax.tree.leaves(params.unstack(model(name)[0].spec(model(name)[1])))}
    found = ((op, sizes) for _, sizes, op in operations(_in_memory(text)) if len(sizes) > 1)
    return sum(op in ("copy", "transpose") and tuple(sorted(sizes)) in weights for op, sizes in found)


def wide_products(text: str, least: int) -> int:
    """Count products of two float32 arrays, one of at least so many numbers."""
    known = {m[0]: m[1:] for m in re.findall(r"%([\w.\-]+) = (\w+)\[([\d,]*)\]", text)}
    found = 0
    for operands in re.findall(r" (?:dot|convolution|custom-call)\(([^)]*)\)", text):
        kinds = [known.get(x.split()[-1].lstrip("%"), ("", "")) for x in operands.split(", ")[:2] if x]
        large = any(_count([int(n) for n in sizes.split(",") if n]) >= least for _, sizes in kinds)
        found += len(kinds) == 2 and all(kind == "f32" for kind, _ in kinds) and large
    return found


def gathers(text: str, size: int) -> int:
    """Count all-gathers of arrays with an axis of this size; token ids are few bytes, and may be."""
    found = [c for c in plan.collectives(text, narrow=False) if c.kind == "all-gather"]
    return sum(bool(re.search(rf"[\[,]{size}[,\]]", shape)) for c in found for shape in c.shapes if shape[0] != "s")


def floor(name: str, chip: str, cache: int, tokens: int = 1) -> float:
    """Seconds that one device needs to read the weights and the cache once, or to multiply a prompt's tokens with them."""
    family, cfg = model(name)
    spec, about = family.spec(cfg), aot.CHIPS[chip]
    read = (params.nbytes(spec, "bfloat16") + cache) / about.bandwidth
    return max(read, 2 * tokens * params.count(spec["layers"]) / about.flops)


def _count(sizes: Any) -> int:
    return math.prod(sizes)
