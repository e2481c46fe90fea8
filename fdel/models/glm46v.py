"""GLM-4.6V-Flash (arXiv:2507.01006): GLM-4.1V's model; its files say of videos' tokens otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fdel.models import glm4v
from fdel.models.keys import ConfigError, mapping, show

MODEL_TYPE, ARCHITECTURE = "glm46v", "Glm46VForConditionalGeneration"


@dataclass(frozen=True, kw_only=True)
class Config(glm4v.Config):
    """Sizes and constants."""

    @classmethod
    def from_hf(cls, d: Mapping[str, Any]) -> Any:
        """Read the dict of a config.json; ConfigError for parts that are not those of GLM-4.1V."""
        if isinstance(d, Mapping):
            for part, known in zip(("text_config", "vision_config"), cls.TYPES, strict=True):
                found = mapping(part, d.get(part)).get("model_type", known)
                if found != known:
                    raise ConfigError(f"{part}: found model_type {show(found)}, understood is {known!r}")
        return super().from_hf(d)

    @classmethod
    def ties(cls, d: Mapping[str, Any]) -> bool:
        """Whether the output projection is the embedding; only what stands around the parts counts."""
        return bool(d.get("tie_word_embeddings"))


spec, encode, hidden, state_spec = glm4v.spec, glm4v.encode, glm4v.hidden, glm4v.state_spec
head, forward = glm4v.head, glm4v.forward
