"""RWKV-4 (arXiv:2305.13048): token mixing by a decaying average, then channel mixing, both with the token before."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config
from fdel.params.spec import Param, ones

MODEL_TYPE, ARCHITECTURE = "rwkv", "RwkvForCausalLM"
KVR = ("key", "value", "receptance")


@config.config
class Config:
    """Sizes and constants; `hf(...)` names each one's key in config.json.

    After every `rescale_every` layers transformers' evaluation halves the stream, and what later layers add to it, so that
    half precision does not overflow; its training does not. Each norm takes the factor out again but for its epsilon, which
    weighs 4^k times as much after k halvings. That is computed here, always. context_length is of a training kernel.
    """

    ONLY = {"context_length": config.ANY}
    vocab: int = config.hf("vocab_size", 50277)
    embed: int = config.hf("hidden_size", 4096)
    layers: int = config.hf("num_hidden_layers", 32)
    inner: int = config.hf("attention_hidden_size", lambda d: d["hidden_size"])
    ffn: int = config.hf("intermediate_size", lambda d: 4 * d["hidden_size"])
    norm_eps: float = config.hf("layer_norm_epsilon", 1e-5)
    rescale_every: int = config.hf("rescale_every", 6)
    tied: bool = config.hf("tie_word_embeddings", False)


def ramp(low: float, high: float):
    """Initialise channels with values that rise from low to high."""
    return lambda key, shape, dtype: jnp.broadcast_to(jnp.linspace(low, high, shape[-1]), shape).astype(dtype)


def spec(cfg: Config) -> dict:
    """Declare every array; the norm of the embeddings stands in the file's first block."""
    name, d, inner = "rwkv.blocks.{layers}.", ("embed", cfg.embed), ("inner", cfg.inner)
    mix = lambda part: Param("embed", (cfg.embed,), ramp(0.0, 1.0), name + part, "1 1 embed")
    channel = lambda part, init: Param("inner", (cfg.inner,), init, f"{name}attention.{part}", dtype="float32")
    layer = {
        **builders.layer_norm("mixer_norm", name + "ln1", cfg.embed),
        **{"mix_" + i: mix(f"attention.time_mix_{i}") for i in KVR},
        **{i: builders.matrix(f"{name}attention.{i}.weight", d, inner) for i in KVR},
        "decay": channel("time_decay", ramp(-5.0, 3.0)),
        "first": channel("time_first", ones),
        "out": builders.matrix(name + "attention.output.weight", inner, d),
        **builders.layer_norm("ffn_norm", name + "ln2", cfg.embed),
        "mix_up": mix("feed_forward.time_mix_key"),
        "mix_gate": mix("feed_forward.time_mix_receptance"),
        "up": builders.matrix(name + "feed_forward.key.weight", d, ("ffn", cfg.ffn)),
        "gate": builders.matrix(name + "feed_forward.receptance.weight", d, ("channels", cfg.embed)),
        "down": builders.matrix(name + "feed_forward.value.weight", ("ffn", cfg.ffn), d),
    }
    tree = builders.decoder(cfg, layer, "rwkv.embeddings", "rwkv.ln_out", head="head", norm_bias=True)
    return tree | builders.layer_norm("embed_norm", "rwkv.blocks.0.pre_ln", cfg.embed)


def state_spec(cfg: Config, *, pages: int = 0, page: int = 64, rows: int) -> ops.State:
    """Declare what serving must remember of `rows` sequences: the last token at two places of a layer, and its sums."""
    shift = builders.conv("", 2, "channels", (cfg.embed,))
    slots = lambda layers: builders.slots(layers, rows, (cfg.inner, 3), "inner state", shift)
    return ops.State(slots=replace(slots(cfg.layers), conv=slots(2 * cfg.layers).conv))


@builders.hidden()
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    norm = lambda x, p, part, eps: ops.layer_norm(x, p[part], p[part + "_bias"], eps)
    halvings = lambda layers: layers // cfg.rescale_every if cfg.rescale_every > 0 else 0

    def shifted(x, carry, place):
        before, carry = ops.token_shift(batch, carry, place, x)
        return lambda mix: x * mix + before * (1 - mix), carry

    def block(x, carry, p, layer):
        eps = cfg.norm_eps * 4.0 ** halvings(layer)
        mixed, carry = shifted(norm(x, p, "mixer_norm", eps), carry, 2 * layer)
        k, v, r = (ops.einsum("...d,id->...i", mixed(p["mix_" + i]), p[i]) for i in KVR)
        y, carry = ops.wkv(batch, carry, layer, k, v, -jnp.exp(p["decay"]), p["first"])
        x = x + ops.einsum("...i,di->...d", jax.nn.sigmoid(r) * y, p["out"])
        mixed, carry = shifted(norm(x, p, "ffn_norm", eps), carry, 2 * layer + 1)
        h = jnp.square(jax.nn.relu(ops.einsum("...d,fd->...f", mixed(p["mix_up"]), p["up"])))
        gate = jax.nn.sigmoid(ops.einsum("...d,cd->...c", mixed(p["mix_gate"]), p["gate"]))
        return x + gate * ops.einsum("...f,df->...d", h, p["down"]), carry

    x = norm(ops.embed(params["embed"], tokens), params, "embed_norm", cfg.norm_eps)
    x, carry = ops.layers(block, x, carry, params["layers"], remat=remat)
    return norm(x, params, "norm", 1e-5 * 4.0 ** halvings(cfg.layers)), carry


head, forward = builders.head, builders.forward(hidden)
