"""One of two processes of an engine: python follow_worker.py COORDINATOR INDEX ADDRESS WHAT. Process 0 prints JSON."""

import json
import os
import sys
import threading
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from fdel import params, serve
from fdel.models import llama
from fdel.ops.weights import LowRank
from fdel.serve.engine import follow, step
from fdel.serve.engine.device import Device
from fdel.serve.engine.engine import Engine, Settings
from fdel.serve.engine.pages import Pool
from fdel.serve.engine.pictures import PromptMedia
from fdel.serve.likelihood import likelihoods
from tests.serve import seer, small, test_sight

SECRET = b"known to both of the processes"
SETTINGS = Settings(rows=4, pages=9, budget=64, batches=(4,), kv_cache_dtype="int8")
PROMPTS = [np.random.default_rng(7).integers(8, small.VOCAB, n).tolist() for n in (70, 63, 12, 9)]
SAMPLING = [
    serve.SamplingParams(max_tokens=10, ignore_eos=True),
    serve.SamplingParams(max_tokens=10, ignore_eos=True),
    serve.SamplingParams(max_tokens=10, temperature=1.0, seed=1, n=2),
    serve.SamplingParams(max_tokens=10, allowed_tokens=list(range(20, 60)), ignore_eos=True),
]
ASK = serve.SamplingParams(max_tokens=10, ignore_eos=True)
SCARCE = 3  # pages, so that a request is preempted


def scored(e: Engine) -> list:
    """Log-probabilities of texts, of what is likeliest there, and of continuations while the engine's thread runs steps."""
    found = [e.score(p, 2) for p in PROMPTS]
    e.start(wait=True)
    job = e.submit(PROMPTS[0], serve.SamplingParams(max_tokens=40, ignore_eos=True))
    many = [[x.logprob for x in likelihoods(e, [(p[:5], p[5:9]) for p in PROMPTS])] for _ in range(3)]
    e.wait(lambda: job.reply.finish_reason is not None)
    return [[[x.logprobs[1:], [[*d.values()] for d in x.top_logprobs[1:]]] for x in found], many, len(job.reply.tokens)]


def answers(e: Engine) -> list:
    """Tokens of all prompts with many pages, then with few; and of one beside a request that is aborted."""
    found = [[g.tokens for g in e.generate(PROMPTS, SAMPLING)]]
    e._core.schedule.pool = Pool(SCARCE, step.PAGE)
    found.append([g.tokens for g in e.generate(PROMPTS, SAMPLING)])
    left = e.submit(PROMPTS[2], serve.SamplingParams(max_tokens=50, ignore_eos=True))
    stays = e.submit(PROMPTS[3], SAMPLING[0])
    while len(left.reply.tokens) < 3:
        e.step()
    e.abort(left)
    e.wait(lambda: stays.reply.finish_reason is not None)
    return [*found, stays.reply.tokens, left.reply.finish_reason, e.stats()["preempted"] > 0]


def others(seed: int) -> dict:
    """New weights: 1 in stacked layers, 2 in another dtype."""
    weights = small.make_model(seed).params
    if seed == 1:
        return weights | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *weights["layers"])}
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)


def adapted(base: dict, seed: int) -> dict:
    """A low-rank adapter of a base, every factor drawn."""
    spec = params.unstack(llama.spec(small.CFG))
    tree = params.lora.add(base, 4, 8.0, key=jax.random.key(seed), spec=spec)
    draw = lambda w: replace(w, b=np.random.default_rng(seed).normal(0, 0.3, w.b.shape).astype(np.float32))
    is_low = lambda w: isinstance(w, LowRank)
    return jax.tree.map(lambda w: draw(w) if is_low(w) else w, tree, is_leaf=is_low)


def changed(e: Engine) -> list:
    """Tokens after the base is replaced, with an adapter of it, with a newer one, without any, and by another base."""
    said = lambda adapter="": [g.tokens for g in e.generate(PROMPTS, ASK, adapter=adapter)]
    before = e.stats()["compiled"]
    e.update_params(others(1), reshard=True)
    found, compiled = [said()], e.stats()["compiled"] - before
    for seed in (5, 6):
        e.update_params(adapted(e.model.params, seed), "a", reshard=True)
        found.append(said("a"))
    e.remove_adapter("a")
    found.append(said())
    e.sleep(weights=True)
    e.update_params(jax.tree.map(np.asarray, others(2)), reshard=True, cast=True)  # from the host, in another dtype
    e.wake()
    return [*found, said(), compiled]


def new_size() -> tuple[list[int], PromptMedia]:
    """A prompt with a picture of a size for which nothing is compiled at the start."""
    return test_sight.prompt(5, test_sight.picture(1, 70), 7)


def seen(e: Engine) -> list:
    """Tokens of a text while a program of the tower is compiled, then those of the picture that waited for it."""
    device, done = e._core.device, threading.Event()
    make = device.compiler
    device.compiler = lambda *size: (compile := make(*size)) and (lambda: done.wait(60) and compile())
    e.start(wait=True)
    tokens, media = new_size()
    held = e.submit(tokens, ASK, media=media)
    text = e.submit(PROMPTS[2], replace(ASK, max_tokens=60))
    e.wait(lambda: text.reply.finish_reason is not None)
    before = len(held.reply.tokens)
    done.set()
    e.wait(lambda: held.reply.finish_reason is not None)
    return [len(text.reply.tokens), before, held.reply.tokens, held.reply.error]


def late(device: Device) -> list[str]:
    """Have a follower's programs compiled later than the leader's: the threads that did it."""
    threads, make = list[str](), device.compiler

    def compiler(name: str, n: int):
        compile = make(name, n)
        return lambda: (time.sleep(2), threads.append(threading.current_thread().name), compile())

    device.compiler = compiler
    return threads


def main(coordinator: str, index: str, address: str, what: str) -> None:
    jax.distributed.initialize(coordinator, 2, int(index))
    model, family, how = small.make_model(), llama, {}
    if what == "sees":
        model, family, how = test_sight.made(), seer, {"sight": test_sight.SIGHT}
    rules = params.SERVE | {"numbers": None, "components": None}  # of the tower
    at = params.shardings(params.unstack(family.spec(model.cfg)), params.make_mesh({"tp": 2}), rules)
    model = model._replace(params=jax.tree.map(lambda x, s: jax.device_put(np.asarray(x), s), model.params, at))
    if index == "1":
        device = Device(model, SETTINGS, **how)
        threads = late(device)
        if what == "dies":
            whole, execute = [], device.execute

            def dying(call):
                whole.append(call.name)
                if len(whole) == 12:
                    os._exit(3)
                return execute(call)

            device.execute = dying
        follow.follow(device, address, SECRET)
        print(*threads, "followed to the end", flush=True)
        return
    e = Engine(model, SETTINGS, make=follow.leading(address, SECRET, 1, 120.0), **how)
    if what == "sees":
        print(json.dumps(seen(e)), flush=True)
        e.close()
        return
    if what == "dies":
        e.start(wait=True)
        job = e.submit(PROMPTS[0], serve.SamplingParams(max_tokens=100, ignore_eos=True))
        e.wait(lambda: job.reply.finish_reason is not None)
        print(json.dumps([job.reply.finish_reason, job.reply.error, len(job.reply.tokens)]), flush=True)
        os._exit(0)  # jax would wait for the process that is gone
    e._core.device.warm_up()
    before = e.stats()["compiled"]
    found = answers(e)
    e.sleep()
    e.wake()
    found.append([g.tokens for g in e.generate(PROMPTS, SAMPLING)] == found[0])
    refused = []
    for ask in (
        lambda: e.update_params(model.params),
        lambda: e.update_params(jax.tree.map(np.asarray, small.make_model(1).params)),
        lambda: e.embed([1, 2]),
    ):
        try:
            ask()
        except ValueError as error:
            refused.append(str(error))
    found += [refused, e.stats()["compiled"] - before]
    found += [changed(e), scored(e)]
    e.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
