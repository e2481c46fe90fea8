"""Keys of config.json that need no reader: they do not change what a forward pass computes, by name or by value."""

import json
from collections.abc import Mapping
from reprlib import repr as show  # bounded: values of a file may be huge
from typing import Any

ANY: Any = object()  # any value of a key is understood
LARGEST = 2**31 - 1
MOST = {"layers": 4096, "experts": 65536}  # by field of a Config: a spec has an entry per layer, a file per expert
DIVIDES = (("kv_heads", "heads"), ("key_heads", "value_heads"), ("groups", "experts"))
POSITIVE = set(
    "vocab embed ffn layers heads kv_heads head_dim query_scale max_positions key_heads value_heads key_dim value_dim "
    "kernel state groups chunk window latent v_dim rope_dim nope_dim every floor patch frames merge out".split()
)


class ConfigError(ValueError):
    """A config.json field that is missing, unknown, or has a value that fdel does not understand."""


class Keys(dict):
    """The dict of a config.json; it notes in `read` which keys a family has asked for."""

    def __init__(self, d: Mapping[str, Any], read: set[str] | None = None):
        super().__init__(d)
        self.read: set[str] = set() if read is None else read

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        if key not in self:
            raise ConfigError(f"config field {key!r} is missing")
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        self.read.add(key)
        return super().get(key, default)

    def __or__(self, other: Any) -> "Keys":
        return Keys({**self, **other}, self.read)


def mapping(key: str, value: Any) -> Mapping[str, Any]:
    """Give an object of a config.json, an empty one for null."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"config field {key!r}: found {show(value)}, expected an object")
    return value or {}


def quantization(d: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give how a config.json says that its weights are quantised; empty: they are not."""
    named = [p.get(k) for p in (d, d.get("text_config") or {}) for k in ("quantization_config", "compression_config")]
    return mapping("quantization_config", next(filter(None, named), None))


# What a file says about itself, about training's start, about generation, and about transformers' classes.
NEUTRAL = frozenset(
    """
    model_type architectures auto_map torch_dtype dtype transformers_version _name_or_path _commit_hash
    _attn_implementation _attn_implementation_autoset attn_implementation _from_model_config _flash_attn_2_enabled
    torchscript use_cache cache_implementation return_dict output_attentions output_hidden_states use_bfloat16
    tf_legacy_loss max_window_layers gradient_checkpointing pruned_heads chunk_size_feed_forward is_encoder_decoder
    is_decoder pretraining_tp
    use_return_dict tokenizer_class prefix problem_type task_specific_params finetuning_task id2label label2id num_labels
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id
    max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature
    top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    initializer_range initializer_factor init_std init_method rescale_prenorm_residual
    output_router_logits router_aux_loss_coef aux_loss_alpha seq_aux ep_size num_nextn_predict_layers
    quantization_config unsloth_version unsloth_fixed
    """.split()
)
# Around a text_config: the parts of a file that a language model leaves out, and the places of their tokens.
OUTER = frozenset(
    """
    text_config vision_config audio_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index
    boi_token_id eoi_token_id image_token_id video_token_id audio_token_id boa_token_id eoa_token_id eoa_token_index
    vision_start_token_id vision_end_token_id image_start_token_id image_end_token_id video_start_token_id
    video_end_token_id vision_soft_tokens_per_image audio_soft_tokens_per_image image_seq_length
    multimodal_projector_bias projector_hidden_act spatial_merge_size vision_feature_layer vision_feature_select_strategy
    projection_hidden_size projection_layer_norm_eps ignore_index media_placeholder_token_id use_unified_vision_chunk
    video_placeholder
    """.split()
)
SWITCHES = ("tie_word_embeddings",)  # around a text_config, and meant for it
TEXT = frozenset(
    {"bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype", "transformers_version", *SWITCHES}
)

# Tensors of checkpoints of several modalities: the language model's prefixes, and what a language model leaves out.
PREFIXES = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
TOWERS = tuple(
    "vision_tower. vision_model. visual. audio_tower. multi_modal_projector. mm_projector. embed_vision. "
    "embed_audio.".split()
)

ONES = {"residual_multiplier", "embedding_multiplier", "logits_scaling", "logit_scale", "lm_head_multiplier"}
TRUE = {"is_causal", "causal", "use_rope", "use_rotary", "rotary", "use_norm", "rms_norm", "use_rms_norm"}


def is_dropout(key: str) -> bool:
    """Whether a key is a rate of dropout, which a forward pass here does not have."""
    return "dropout" in key or key.endswith("_pdrop") or key in ("drop_path_rate", "layerdrop")


def is_neutral(key: str, value: Any) -> bool:
    """Whether a key that nothing reads says that there is nothing: null, false, 0, empty; for some keys, 1 or true."""
    if key in ONES or key in TRUE:
        return value is None or value == 1
    if key.startswith("summary_"):  # of a head for classification, GPT-2's time
        return True
    return value is None or value is False or (isinstance(value, int | float | str | list | dict) and not value)


def text_tensor(name: str) -> str | None:
    """Give a tensor's name in the language model of a file of several modalities; None for those of other parts."""
    for prefix, ours in PREFIXES.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return None if name.removeprefix("model.").startswith(TOWERS) else name


def dropouts(cfg: Any) -> dict[str, float]:
    """Give the dropout rates of a Config's config.json that are not zero; a forward pass here has none."""
    found = json.loads(cfg.source)
    return {k: v for k, v in found.items() if is_dropout(k) and isinstance(v, int | float) and v}
