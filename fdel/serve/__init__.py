"""Serve models: an engine of continuous batches, generation in one call, beam search, and the naive oracle."""

from fdel.serve.beam import Beam, beam_search
from fdel.serve.core import MaskSource
from fdel.serve.engine import Engine, Settings, unsupported
from fdel.serve.generate import generate, stream
from fdel.serve.naive import naive_generate
from fdel.serve.reply import Delta, Generation, Score
from fdel.serve.request import SamplingParams
from fdel.serve.sample import Sampled, Sampling, process, sample, sampling_rows
from fdel.serve.schedule import QueueFull

__all__ = [
    "Beam",
    "Delta",
    "Engine",
    "Generation",
    "MaskSource",
    "QueueFull",
    "Sampled",
    "Sampling",
    "SamplingParams",
    "Score",
    "Settings",
    "beam_search",
    "generate",
    "naive_generate",
    "process",
    "sample",
    "sampling_rows",
    "stream",
    "unsupported",
]
