"""Losses: pure functions of token statistics and masks that return sums, never means."""

from fdel.train.losses.head import token_stats, token_sum
from fdel.train.losses.model import rows, score, shift
from fdel.train.losses.sft import nll, sft
from fdel.train.losses.stats import IGNORE, TokenStats, from_logits

__all__ = ["IGNORE", "TokenStats", "from_logits", "nll", "rows", "score", "sft", "shift", "token_stats", "token_sum"]
