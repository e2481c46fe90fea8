"""A tiny Whisper with every weight random, by transformers; its vocabulary is laid out as the real one."""

from pathlib import Path
from typing import Any

from tests.models.tiny.randomise import randomise

END, START, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMES = range(80, 89)
VALUES = dict(
    vocab_size=NO_TIMES + 1 + 21, num_mel_bins=16, encoder_layers=2, encoder_attention_heads=2, decoder_layers=3,
    decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=48, d_model=32, max_source_positions=20,
    max_target_positions=48, decoder_start_token_id=START, pad_token_id=END, bos_token_id=END, eos_token_id=END,
    begin_suppress_tokens=None, scale_embedding=True,
)  # fmt: skip
GENERATION = dict(
    is_multilingual=True, lang_to_id={"<|en|>": EN, "<|de|>": DE}, no_timestamps_token_id=NO_TIMES,
    task_to_id={"transcribe": TRANSCRIBE, "translate": TRANSLATE}, prev_sot_token_id=PREVIOUS, max_length=48,
    suppress_tokens=[5, 6, START, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH], begin_suppress_tokens=[7, END],
    max_initial_timestamp_index=8, alignment_heads=[[1, 2], [2, 0], [2, 3]],
)  # fmt: skip


def make(directory: Path, seed: int = 0) -> Any:
    """transformers' model, which is saved in a directory too."""
    import torch
    import transformers

    oracle = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**VALUES)).eval()
    randomise(oracle, seed)
    with torch.no_grad():  # or each token, by its own embedding, foresees itself
        oracle.model.decoder.embed_tokens.weight *= 0.3
        oracle.model.decoder.embed_positions.weight *= 3
    for name, value in GENERATION.items():
        setattr(oracle.generation_config, name, value)
    oracle.save_pretrained(directory)
    tokenizer().save(str(directory / "tokenizer.json"))
    return oracle


def tokenizer() -> Any:
    """One token for each of 80 characters, and the special tokens behind them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789Ġ.,!?'-:;()/&%$#@+"
    tok = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    named = "endoftext startoftranscript en de translate transcribe startofprev nospeech notimestamps".split()
    tok.add_special_tokens([f"<|{n}|>" for n in (*named, *(f"{i * 0.02:.2f}" for i in range(21)))])
    return tok
