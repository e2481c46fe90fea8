"""OpenAI's protocol as pure functions: bodies of requests to records, outputs to bodies of answers and chunks.

    request = openai.parse_chat(openai.load(body), limits)      # APIError: status, headers and `body.error(e)`
    chunk = body.sse(body.chat_chunk(meta, 0, body.chat_delta(delta)))

Neither jax nor an HTTP library is needed. `responses` is the Responses API.
"""

# ruff: noqa: F401, I001  (names for callers, in a few lines)
from fdel.serve.server.openai import body, responses, transcripts
from fdel.serve.server.openai.checks import APIError, failure, load
from fdel.serve.server.openai.pooled import (
    Pooled, Ranking, parse_classify, parse_embeddings, parse_pooling, parse_rerank, parse_score,
)  # fmt: skip
from fdel.serve.server.openai.request import (
    Chat, Completion, Tool, cap_max_tokens, parse_chat, parse_completion, parse_detokenize, parse_tokenize,
)  # fmt: skip
from fdel.serve.server.openai.tables import Limits, requests
