"""Falcon Mamba (arXiv:2410.05355): Mamba with norms without weights on time steps, B and C."""

from fdel.models import config, mamba
from fdel.models.mamba import forward, head, hidden, rename, spec, state_spec

MODEL_TYPE, ARCHITECTURE = "falcon_mamba", "FalconMambaForCausalLM"
__all__ = ["ARCHITECTURE", "MODEL_TYPE", "Config", "forward", "head", "hidden", "rename", "spec", "state_spec"]


@config.config
class Config(mamba.Config):
    """Sizes and constants."""

    ONLY = mamba.Config.ONLY | {"use_falcon_mambapy": config.ANY}
    mixer_eps: float | None = config.hf("mixer_rms_eps", 1e-6)
