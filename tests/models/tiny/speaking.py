"""Qwen3-Omni as a whole: thinker, talker, and the vocoder; no entry of the suite of families."""

import json

from .qwenomni import AUDIO, TEXT, THINKER
from .qwenvl import DEEP, IN_TURN
from .randomise import randomise

SEE, SEEN, HEAR, HEARD, IMAGE, VIDEO, SOUND = 118, 119, 116, 117, 120, 121, 122
BEGIN, END, SYSTEM, USER, ASSISTANT = 100, 101, 105, 106, 107
LOUDNESS = (
    0.4  # of the vocoder's convolutions: few samples are cut off at -1 and 1, and its sines are smooth in float32
)
# The talker's tokens: 64 codes, and 1024 beside them that generate() suppresses, as transformers has these numbers.
TALKER_TEXT = dict(vocab_size=1088, hidden_size=48, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
                   num_key_value_heads=2, head_dim=16, moe_intermediate_size=24, shared_expert_intermediate_size=20,
                   num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, rope_parameters=IN_TURN)  # fmt: skip
PREDICTOR = dict(vocab_size=64, hidden_size=48, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16, num_code_groups=4)  # fmt: skip
TALKER = dict(thinker_hidden_size=64, num_code_groups=4, accept_hidden_layer=3, codec_eos_token_id=70, codec_nothink_id=71,
              codec_think_bos_id=72, codec_think_eos_id=73, codec_pad_id=74, codec_bos_id=75, audio_token_id=SOUND,
              image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=SEE, audio_start_token_id=HEAR,
              position_id_per_seconds=13, spatial_merge_size=2, speaker_id={"ethan": 76, "chelsie": 77},
              text_config=TALKER_TEXT, code_predictor_config=PREDICTOR)  # fmt: skip
VOCODER = dict(codebook_size=64, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=40,
               num_hidden_layers=2, num_quantizers=4, upsample_rates=[4, 3], upsampling_ratios=[2, 2], decoder_dim=16,
               sliding_window=6, rms_norm_eps=1e-3)  # fmt: skip
VALUES = dict(
    thinker_config=THINKER | dict(audio_config=AUDIO, vision_config=DEEP, text_config=TEXT | dict(num_hidden_layers=4)),
    talker_config=TALKER, code2wav_config=VOCODER, enable_audio_output=True, im_start_token_id=BEGIN, im_end_token_id=END,
    tts_pad_token_id=102, tts_bos_token_id=103, tts_eos_token_id=104, system_token_id=SYSTEM, user_token_id=USER,
    assistant_token_id=ASSISTANT,
)  # fmt: skip


def make(directory, seed: int = 0):
    """Make a checkpoint, every weight random; gives transformers' model."""
    import torch
    import transformers

    cfg = transformers.Qwen3OmniMoeConfig(**json.loads(json.dumps(VALUES)))
    out = transformers.Qwen3OmniMoeForConditionalGeneration._from_config(
        cfg, attn_implementation="eager", dtype=torch.float32
    )
    randomise(out, seed)
    with torch.no_grad():
        for name, p in out.code2wav.decoder.named_parameters():
            p.mul_(LOUDNESS if name.endswith("conv.weight") else 1)
    out.save_pretrained(directory)
    return out.eval()
