"""Qwen3-Omni's thinker."""

from .entry import BASE, Entry
from .qwenvl import DEEP, IN_TURN, TOKENS

AUDIO = dict(num_mel_bins=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=48, d_model=32,
             max_source_positions=64, n_window=50, n_window_infer=200, output_dim=64, downsample_hidden_size=6)  # fmt: skip
TEXT = BASE | dict(head_dim=16, num_hidden_layers=3, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40,
                   rope_parameters=IN_TURN)  # fmt: skip
THINKER = TOKENS | dict(
    audio_token_id=122, audio_start_token_id=116, audio_end_token_id=117, position_id_per_seconds=13
)
VALUES = dict(thinker_config=THINKER | dict(audio_config=AUDIO, vision_config=DEEP, text_config=TEXT),
              enable_audio_output=False)  # fmt: skip


def make(values: dict, seed: int):
    """Make the model without its talker, whose forward is the thinker's: transformers' own has none."""
    import torch
    import transformers

    from .randomise import randomise

    class Qwen3OmniMoeForConditionalGeneration(transformers.Qwen3OmniMoeForConditionalGeneration):
        def forward(self, *args, **kwargs):
            return self.thinker(*args, **kwargs)

    cfg = transformers.Qwen3OmniMoeConfig(**values)
    out = Qwen3OmniMoeForConditionalGeneration._from_config(cfg, attn_implementation="eager", dtype=torch.float32)
    randomise(out, seed)
    return out.eval()


TINY = {
    "qwen3_omni_moe": Entry("Qwen3OmniMoeConfig", VALUES, "Qwen3OmniMoeForConditionalGeneration", make=make, loss=3)
}
