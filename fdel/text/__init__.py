"""Turn text into tokens and back: tokenizers, chat templates, incremental detokenisation; for train and serve.

A folder in the Hugging Face layout becomes a `Tokenizer` (`load`, `save`); `encode` and `decode` give what transformers
gives. `render_chat` and `chat_tokens` apply its chat template. `step` and `flush` stream text out of token ids.
Nothing here needs jax.
"""

from fdel.text.chat import ChatError, chat_tokens, render_chat, template_variables
from fdel.text.stream import Detokenizer, flush, step, token_bytes
from fdel.text.tokenizer import Tokenizer, decode, encode, load, save, train_bpe

__all__ = ["ChatError", "Detokenizer", "Tokenizer", "chat_tokens", "decode", "encode", "flush", "load", "render_chat",
           "save", "step", "template_variables", "token_bytes", "train_bpe"]  # fmt: skip
