"""Sounds written down by Whisper: its tokens, the rules of timestamps, decoding in batches, long sounds, words' times."""

from fdel.serve.hear.listen import Listener, run
from fdel.serve.hear.tokens import Tokens
from fdel.serve.hear.windows import Options, Segment, Transcript, transcribe

__all__ = ["Listener", "Options", "Segment", "Tokens", "Transcript", "run", "transcribe"]
