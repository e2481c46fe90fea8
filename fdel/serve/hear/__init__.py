"""Sounds written down by Whisper: its tokens, the rules of timestamps, continuous batches, long sounds, words' times."""

from fdel.serve.hear.batch import run
from fdel.serve.hear.listen import Listener
from fdel.serve.hear.tokens import Tokens
from fdel.serve.hear.windows import Options, Segment, Transcript, transcribe

__all__ = ["Listener", "Options", "Segment", "Tokens", "Transcript", "run", "transcribe"]
