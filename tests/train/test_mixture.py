"""The mixture of a policy and its reference, against transformers' logits of both."""

import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, ops, params, serve
from fdel.serve import Engine, Settings
from fdel.train.rollout import mixture

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch (extra `test`)")
import tiny  # noqa: E402


@pytest.mark.parametrize(
    ("name", "share"), [("llama", 0.3), pytest.param("gemma4_text", 0.5, marks=pytest.mark.matrix), ("gpt_j", 1.0)]
)
def test_what_is_sampled_is_the_geometric_mixture(name, share, tmp_path):
    """Of prompts that are computed in chunks, then token by token, over a cache of each model; 2e-5."""
    oracles = [tiny.build(name, seed) for seed in (0, 1)]
    for oracle, side in zip(oracles, "ab", strict=True):
        oracle.config.final_logit_softcapping = None  # gemma4's logits would be no sum of two products
        oracle.save_pretrained(tmp_path / side)
    policy, reference = (models.load(tmp_path / side, dtype=jnp.float32) for side in "ab")
    cfg = mixture.Config(policy.family, policy.cfg, share)
    model = models.Model(mixture, cfg, {**policy.params, "reference": reference.params})
    prompts = [np.random.default_rng(n).integers(3, 110, n).tolist() for n in (21, 6)]
    engine = Engine(model, Settings(rows=2, budget=16, max_length=64))
    found = engine.generate(prompts, serve.SamplingParams(max_tokens=6, seed=1, temperature=1.0, ignore_eos=True))
    engine.close()
    for prompt, g in zip(prompts, found, strict=True):
        ids = [*prompt, *g.tokens]
        assert len(g.tokens) == 6 and g.error is None
        with torch.no_grad():
            told = [oracle(torch.tensor([ids])).logits[0].double() for oracle in oracles]
        mixed = torch.log_softmax((1 - share) * told[0] + share * told[1], -1)
        want = [float(mixed[i - 1, ids[i]]) for i in range(len(prompt), len(ids))]
        np.testing.assert_allclose(g.sampled_logprobs, want, atol=2e-5)


def test_what_cannot_be_mixed():
    of = lambda name: (models.family(name), models.family(name).Config.from_hf(tiny.build(name).config.to_dict()))
    with pytest.raises(ValueError, match="mamba keeps recurrent state"):
        mixture.Config(*of("mamba"), 0.5)
    with pytest.raises(ValueError, match="share=1.5"):
        mixture.Config(*of("llama"), 1.5)
    family, cfg = of("gemma2")
    model = params.abstract(mixture.spec(cfg := mixture.Config(family, cfg, 0.5)))
    with pytest.raises(ValueError, match="gemma2 caps its logits"):
        mixture.head(model, cfg)
    with pytest.raises(ValueError, match="no taps"):
        mixture.hidden(model, jnp.zeros((1, 4), jnp.int32), cfg, taps=ops.Taps())
