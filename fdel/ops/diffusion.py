"""Discrete diffusion that mixes masks and random tokens (arXiv:2503.04482, by log-SNR as in arXiv:2512.10858, section 3).

At log-SNR l a token is kept with probability alpha = sigmoid(l); else it is drawn from pi(l): a random other token than the
mask with probability sigmoid(l + shift), else the mask. Far below zero `shift` gives masks alone, far above random tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LogSNR = Float[Array, "..."]  # broadcasts with the tokens


@dataclass(frozen=True)
class Noise:
    """The process: its vocabulary and the id of its mask, and the least and the greatest log-SNR."""

    vocab: int
    mask: int
    shift: float = 0.0
    low: float = -9.0
    high: float = 9.0

    def __post_init__(self) -> None:
        if not (0 <= self.mask < self.vocab and self.vocab > 1 and self.low < self.high):
            raise ValueError(f"{self}: expected mask in 0 to vocab - 1, a vocab of at least 2, and low < high")


def log_snr_at(n: Noise, time: Float[Array, "..."]) -> LogSNR:
    """Compute the log-SNR at a time from 0 (`high`) to 1 (`low`), in which alpha falls evenly."""
    high, low = jax.nn.sigmoid(n.high), jax.nn.sigmoid(n.low)
    alpha = high + (low - high) * time
    return jnp.clip(jnp.log(alpha) - jnp.log1p(-alpha), n.low, n.high)


def mixing(n: Noise, tokens: Int[Array, "..."], log_snr: LogSNR) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Compute pi of tokens and its derivative by the log-SNR."""
    share, is_mask = jax.nn.sigmoid(log_snr + n.shift), tokens == n.mask
    slope = share * (1 - share)
    return jnp.where(is_mask, 1 - share, share / (n.vocab - 1)), jnp.where(is_mask, -slope, slope / (n.vocab - 1))


def marginal(n: Noise, probs: Float[Array, "... V"], log_snr: LogSNR) -> Float[Array, "... V"]:
    """Compute alpha probs + (1 - alpha) pi: how a token of distribution `probs` looks at a log-SNR."""
    alpha, at = jax.nn.sigmoid(log_snr)[..., None], log_snr[..., None]
    return alpha * probs + (1 - alpha) * mixing(n, jnp.arange(n.vocab), at)[0]


def corrupt(n: Noise, key: Array, tokens: Int[Array, "..."], log_snr: LogSNR) -> Int[Array, "..."]:
    """Draw from `marginal` of tokens."""
    keep, kind, which = jax.random.split(key, 3)
    chance = lambda key, p: jax.random.bernoulli(key, p, tokens.shape)
    other = jax.random.randint(which, tokens.shape, 0, n.vocab - 1)
    other = other + (other >= n.mask)
    noise = jnp.where(chance(kind, jax.nn.sigmoid(log_snr + n.shift)), other, n.mask)
    return jnp.where(chance(keep, jax.nn.sigmoid(log_snr)), tokens, noise).astype(tokens.dtype)


def elbo(
    n: Noise, logits: Float[Array, "... V"], noisy: Int[Array, "..."], tokens: Int[Array, "..."], log_snr: LogSNR
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Compute each token's (weight, divergence): the negative ELBO is the integral of their product over the log-SNR.

    The divergence is KL(q || p) + r - log r - 1 of the marginals q of the token and p of the prediction, r = q(z) / p(z) at
    the noisy token z (arXiv:2503.04482, theorem 3.2). The mask is never predicted. In float32.
    """
    logits = jnp.where(jnp.arange(n.vocab) == n.mask, -jnp.inf, logits.astype(jnp.float32))
    pi, slope = mixing(n, noisy, log_snr)
    weight = (pi - slope) / (pi + jnp.exp(log_snr) * (noisy == tokens))
    log_p, log_q = (
        jnp.log(jnp.maximum(marginal(n, x, log_snr), jnp.finfo(jnp.float32).tiny))
        for x in (jax.nn.softmax(logits), jax.nn.one_hot(tokens, n.vocab))
    )
    at = lambda x: jnp.take_along_axis(x, noisy[..., None], -1)[..., 0]
    ratio = at(log_q) - at(log_p)
    return weight, (jnp.exp(log_q) * (log_q - log_p)).sum(-1) + jnp.expm1(ratio) - ratio


def posterior(
    n: Noise, probs: Float[Array, "... V"], noisy: Int[Array, "..."], log_snr: LogSNR, less: LogSNR
) -> Float[Array, "... V"]:
    """Compute the distribution of tokens at the greater log-SNR `less`, given those at `log_snr` and predicted `probs`."""
    alpha, before = jax.nn.sigmoid(log_snr), jax.nn.sigmoid(less)
    ratio, at = alpha / before, lambda snr: mixing(n, noisy, snr)[0]
    change = jnp.maximum((1 - alpha) * at(log_snr) - ratio * (1 - before) * at(less), 0)
    same = jax.nn.one_hot(noisy, n.vocab) * ratio[..., None]
    p = marginal(n, probs, less) * (same + change[..., None])
    return p / p.sum(-1, keepdims=True)


def denoise(
    n: Noise, logits: Callable[[Int[Array, "B T"]], Float[Array, "B T V"]], key: Array, tokens: Int[Array, "B T"],
    free: Array, *, steps: int = 128, temperature: float = 1.0,
) -> Int[Array, "B T"]:  # fmt: skip
    """Write the tokens where bool[B T] `free` is: from noise in `steps` steps of ancestral sampling, others stay.

    `logits(tokens)` is the model: `lambda t: family.forward(params, t, cfg)[0]`.
    """
    if steps < 1 or temperature <= 0:
        raise ValueError(f"{steps=}, {temperature=}; expected at least one step and a temperature above 0")
    levels = log_snr_at(n, jnp.linspace(1.0, 0.0, steps + 1))
    first, key = jax.random.split(key)
    noise = corrupt(n, first, jnp.full_like(tokens, n.mask), jnp.full((), n.low))
    not_mask = jnp.arange(n.vocab) != n.mask

    def step(i: Array, z: Array) -> Array:
        x = jnp.where(not_mask, logits(z).astype(jnp.float32) / temperature, -jnp.inf)
        p = posterior(n, jax.nn.softmax(x), z, levels[i], levels[i + 1])
        drawn = jax.random.categorical(jax.random.fold_in(key, i), jnp.log(p)).astype(z.dtype)
        return jnp.where(free, drawn, z)

    return jax.lax.fori_loop(0, steps, step, jnp.where(free, noise, tokens))
