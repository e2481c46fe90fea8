"""The routes that ask what a model makes of whole texts: embeddings, classes, scores of pairs."""

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np
from aiohttp import web

from fdel.models import heads
from fdel.serve.server import dual, labels, openai
from fdel.serve.server.call import Call
from fdel.serve.server.openai import APIError, body
from fdel.serve.server.served import Prompts, ServedModel
from fdel.serve.server.tokenizing import PAIRS


async def embeddings(call: Call) -> web.Response:
    """POST /v1/embeddings: final hidden states, pooled as the model's files say; else the last token's, of unit length.

    A model of two towers embeds texts and images.
    """
    if (two := call.dual()) is not None:
        return await dual.embeddings(call, two)
    served = call.served()
    asked, pooling = await call.parse(openai.parse_embeddings, served), served.engine.pooling
    cfg = served.engine.model.cfg
    width = getattr(cfg, "width", cfg.embed)
    width = width if pooling is None else pooling.width(width)
    dual.check_width(asked, width)
    if served.engine.head is not None:
        raise APIError(f"{served.name} has a head for a {served.engine.head}; ask /classify or /pooling", param="model")
    ids = await _pooled(call, served, asked)
    vectors = await _vectors(call, served, ids, asked.activation)
    return call.json(body.embeddings(asked.model, vectors, asked.base64, sum(map(len, ids))))


def _prompted(served: ServedModel, texts: Sequence) -> list:
    """Put the default prompt of an embedding model's files in front of those that are texts."""
    pooling = served.engine.pooling
    return [pooling.prompt + t if pooling is not None and isinstance(t, str) else t for t in texts]


def _unit(v: np.ndarray) -> np.ndarray:
    return v / max(float(np.linalg.norm(v)), 1e-12)


async def _each(call: Call, served: ServedModel, ids: Prompts, ask: Callable[..., list]) -> list[np.ndarray]:
    """Ask the engine about all texts, row by row; others take their turns between, and a client may leave."""
    served.check_lengths(ids)
    call.admit(sum(map(len, ids)))
    one = lambda group: lambda: ask([ids[i] for i in group], adapter=served.adapter)
    found: dict[int, np.ndarray] = {}
    for group in served.engine.together(ids):
        found |= zip(group, await call.in_thread(one(group)), strict=True)
    return [found[i] for i in range(len(ids))]


async def _vectors(call: Call, served: ServedModel, ids: Prompts, activation: bool) -> list[np.ndarray]:
    """Embed texts; of unit length where the model's files do not say otherwise, and nowhere without `activation`."""
    pooling = served.engine.pooling
    pool = None if activation or pooling is None else replace(pooling, normalize=False)
    found = await _each(call, served, ids, functools.partial(served.engine.embed_all, pool=pool))
    return list(map(_unit, found)) if pooling is None and activation else found


def ranker(parse: Callable) -> Callable[[Call], Awaitable[web.Response]]:
    """Make the route of scores or of a ranking: a classifier's of the pair, else the cosine of its embeddings."""

    async def rank(call: Call) -> web.Response:
        served = call.served()
        asked = await call.parse(parse, served)
        if served.engine.head is None:
            texts = list(dict.fromkeys(t for pair in asked.pairs for t in pair))
            ids = await call.encode(served, _prompted(served, texts))
            vectors = dict(zip(texts, map(_unit, await _each(call, served, ids, served.engine.embed_all)), strict=True))
            values = [float(vectors[a] @ vectors[b]) for a, b in asked.pairs]
        else:
            labels = len(_classifier(served))
            if labels != 1:
                raise APIError(
                    f"{served.name} has {labels} labels; a score needs a model of one: ask /classify", param="model"
                )
            if PAIRS not in served.tokenizer.templates:
                _without_types(served)
            ids = await call.workers.encode(call.holder, served.base, asked.pairs)
            values = [float(p[0]) for p in await _classes(call, served, ids, asked.activation)]
        meta, used = body.meta("score", asked.model), sum(map(len, ids))
        if asked.top is None:
            return call.json(body.scores(meta, values, used))
        documents = [d for _, d in asked.pairs] if asked.documents else None
        return call.json(body.ranking(meta, values, documents, asked.top, used))

    return rank


score_pairs, rerank = ranker(openai.parse_score), ranker(openai.parse_rerank)


def _without_types(served: ServedModel) -> None:
    """Refuse pairs for a model that tells its texts apart by types of tokens, which no family here reads."""
    tok, types = served.tokenizer, getattr(served.engine.model.cfg, "types", 1)
    given = "token_type_ids" in tok.config.get("model_input_names", ["token_type_ids"])
    if types > 1 and given and any(tok.backend.encode("a", "a").type_ids):
        raise APIError(
            f"{served.name} numbers the texts of a pair by token types, which are not read here", param="model"
        )


def _classifier(served: ServedModel) -> list[str]:
    """Name the labels of a model that classifies sequences; APIError for another."""
    if served.engine.head != "sequence":
        found = "no head" if served.engine.head is None else f"a head for a {served.engine.head}"
        raise APIError(f"{served.name} has {found}, so that it classifies no texts; see /pooling", param="model")
    model = served.engine.model
    return heads.label_names(model.cfg, heads.count(model.params))


async def _classes(call: Call, served: ServedModel, ids: Prompts, activation: bool) -> list[np.ndarray]:
    """Give what the model's head says of each text, as probabilities or (activation False) as logits."""
    logits = await _each(call, served, ids, served.engine.classify_all)
    plain = not activation or served.engine.head in ("question", "value")
    return logits if plain else [heads.probabilities(served.engine.model.cfg, x) for x in logits]


async def _pooled(call: Call, served: ServedModel, asked: openai.Pooled) -> list[list[int]]:
    """Tokenize what is to be classified or pooled."""
    if isinstance(asked.prompts, openai.Chat):
        if asked.prompts.shown:
            path = asked.prompts.shown[0].path
            raise APIError(f"{path}: {served.name} sees in chats alone; leave images out here", param=path)
        return [(await call.workers.chat(call.holder, served.base, asked.prompts, call.large))[1]]
    return await call.encode(served, _prompted(served, asked.prompts))


async def classify(call: Call) -> web.Response:
    """POST /classify: the class of each text, or of a conversation; a model of two towers gives images labels.

    One that hears names the classes of sounds.
    """
    if (two := call.dual()) is not None:
        return await dual.classify(call, two)
    if (hearing := call.labels()) is not None:
        return await labels.classify(call, hearing)
    served = call.served()
    asked, names = await call.parse(openai.parse_classify, served), _classifier(served)
    if asked.labels:
        found = f"candidate_labels: {served.name} has labels of its own, {', '.join(names)}"
        raise APIError(f"{found:.300}; leave them out, or ask a model that scores images", param="candidate_labels")
    ids = await _pooled(call, served, asked)
    rows = await _classes(call, served, ids, asked.activation)
    return call.json(body.classes(body.meta("classify", asked.model), rows, names, sum(map(len, ids))))


async def pool(call: Call) -> web.Response:
    """POST /pooling: what the model's head says of each text or of its tokens, else its embedding."""
    served = call.served()
    asked = await call.parse(openai.parse_pooling, served)
    ids = await _pooled(call, served, asked)
    if served.engine.head is None:
        rows = await _vectors(call, served, ids, asked.activation)
    else:
        rows = await _classes(call, served, ids, asked.activation)
    return call.json(body.pooled(body.meta("pool", asked.model), rows, asked.base64, sum(map(len, ids))))
