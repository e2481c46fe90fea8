"""OpenAI's protocol as pure functions: bodies of requests to records, outputs to bodies of answers and chunks.

    request = openai.parse_chat(openai.load(body), limits)      # APIError: status, headers and `body.error(e)`
    chunk = body.sse(body.chat_chunk(meta, 0, body.chat_delta(delta)))

Neither jax nor an HTTP library is needed. `responses` is the Responses API.
"""

from fdel.serve.openai import body, responses
from fdel.serve.openai.checks import APIError, load
from fdel.serve.openai.request import (
    Chat,
    Completion,
    Embeddings,
    Ranking,
    Tool,
    fit,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_embeddings,
    parse_rerank,
    parse_score,
    parse_tokenize,
)
from fdel.serve.openai.tables import Limits, requests

__all__ = [
    "APIError",
    "Chat",
    "Completion",
    "Embeddings",
    "Limits",
    "Ranking",
    "Tool",
    "body",
    "fit",
    "load",
    "parse_chat",
    "parse_completion",
    "parse_detokenize",
    "parse_embeddings",
    "parse_rerank",
    "parse_score",
    "parse_tokenize",
    "requests",
    "responses",
]
