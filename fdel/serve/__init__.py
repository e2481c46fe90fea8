"""Serve models: generation with a paged cache, beam search, and the naive generator that is their oracle."""

from fdel.serve.beam import Beam, beam_search
from fdel.serve.generate import generate, stream
from fdel.serve.naive import naive_generate
from fdel.serve.reply import Delta, Generation
from fdel.serve.request import SamplingParams
from fdel.serve.sample import Sampled, Sampling, process, sample, sampling_rows

__all__ = [
    "Beam",
    "Delta",
    "Generation",
    "Sampled",
    "Sampling",
    "SamplingParams",
    "beam_search",
    "generate",
    "naive_generate",
    "process",
    "sample",
    "sampling_rows",
    "stream",
]
