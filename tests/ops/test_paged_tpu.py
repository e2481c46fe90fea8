"""The TPU kernel for attention over pages, interpreted with a detector of races, against a formula in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fdel import models, ops, params, serve
from fdel.kernels import paged_attention_tpu as kernel
from fdel.kernels import paged_program_tpu as program
from fdel.kernels import paged_prompt_tpu as prompt
from fdel.models import llama
from fdel.ops.batch import Paged, Pages
from fdel.ops.paged import paged_attention
from fdel.ops.platform import tracing_for
from tests.ops.paged_cases import Sizes, case
from tests.serve import small

RACES = pltpu.InterpretParams(detect_races=True)


def error(monkeypatch, keys: int, c, mask, sinks: bool = True, how=RACES) -> float:
    """Largest difference from the formula, in tokens of sequences; `keys` are attended to at a time."""
    monkeypatch.setattr(program, "KEYS", {True: keys, False: keys})
    with tracing_for("tpu"), ops.use(paged_attention="mosaic"), pltpu.force_tpu_interpret_mode(how):
        given = dict(mask=mask, sinks=c.sinks if sinks else None, v_dim=c.want.shape[-1])
        got = paged_attention(c.batch, c.cache, jnp.int32(1), c.q, **given)
    return float(np.abs(np.asarray(got, np.float64) - c.want)[c.real].max())  # NaN if any number is


CALLS = {
    "decode": (Sizes(2, 64, 2, 16, 4), 1, 4, [(50, 1), (0, 0), (33, 1), (64, 1)], {"window": 20, "softcap": 20.0}),
    "chunks": (Sizes(1, 128, 1, 8, 6), 8, 3, [(30, 19), (9, 9), (0, 0), (41, 5)], {"chunk": 16}),
    "latents": (Sizes(1, 160, 1, 8, 6, 128), 1, 8, [(40, 1), (0, 0), (33, 1)], {"window": 20, "softcap": 20.0}),
    "chunks of latents": (Sizes(1, 160, 1, 8, 6, 128), 8, 4, [(30, 19), (0, 0), (41, 5)], {"window": 25}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("decode", jnp.float32, 2e-6),
        pytest.param("chunks", jnp.float32, 5e-6, marks=pytest.mark.matrix),
        pytest.param("latents", jnp.float32, 5e-6, marks=pytest.mark.matrix),
        ("chunks of latents", jnp.float32, 5e-6),
        pytest.param("chunks", jnp.bfloat16, 0.02, marks=pytest.mark.matrix),
        pytest.param("latents", jnp.bfloat16, 0.02, marks=pytest.mark.matrix),
        pytest.param("chunks of latents", jnp.bfloat16, 0.02, marks=pytest.mark.matrix),
    ],
)
def test_attention_over_pages_equals_a_formula(name, dtype, tolerance, monkeypatch, capsys):
    """Runs of several tokens in a tile, rows without tokens, groups of pages that end early; heads of chunks of latents
    are cut in two parts. With sinks, but for the chunks with values of their own, where pages hold NaN but no huge key.

    The largest outputs are 4; seen: 7e-7, 2e-6, 1.2e-6, 1.6e-6 and 0.01."""
    sizes, block, heads, sequences, spec = CALLS[name]
    sizes, mask = sizes._replace(page=16) if dtype == jnp.bfloat16 else sizes, ops.Mask(0.3, **spec)
    c = case(sizes, block, heads, sequences, mask, dtype, sinks=name != "chunks")
    if name == "chunks of latents":
        monkeypatch.setattr(kernel, "TILE", block * kernel._token_bytes(c.cache, c.q, sizes.latent) // 2)
        assert kernel._parts(c.batch, c.cache, c.q, sizes.latent) == 2
    assert error(monkeypatch, 32 if name == "decode" else 16, c, mask, name != "chunks") < tolerance
    assert "RACE" not in "".join(capsys.readouterr())


FEW = {
    "decode": (Sizes(4, 64, 2, 32, 3), 1, 8, [(50, 1), (0, 0), (33, 1), (96, 1)], {"window": 20, "softcap": 20.0}),
    "heads of 96": (Sizes(3, 96, 1, 32, 3), 1, 3, [(50, 1), (0, 0), (33, 1), (96, 1)], {"window": 20}),
    "heads of 512": (Sizes(2, 512, 1, 32, 3), 1, 4, [(50, 1), (0, 0), (96, 1)], {}),
    "chunks": (Sizes(1, 128, 1, 32, 3), 8, 3, [(70, 19), (9, 9), (0, 0), (41, 5)], {"chunk": 32}),
    "latents": (Sizes(1, 576, 1, 32, 3, 512), 1, 8, [(90, 1), (0, 0), (33, 1)], {"window": 40, "softcap": 20.0}),
    "chunks of latents": (Sizes(1, 576, 1, 32, 3, 512), 8, 4, [(80, 19), (0, 0), (41, 5)], {"window": 25}),
    "few latents": (Sizes(1, 160, 1, 32, 3, 128), 1, 4, [(70, 1), (0, 0)], {"window": 40}),
}
OFTEN = ("decode", "fp8"), ("latents", "int8"), ("heads of 96", "int8"), ("heads of 512", "int8")
BITS = [
    pytest.param(name, format, dtype, marks=[] if (name, format) in OFTEN and dtype == jnp.float32 else pytest.mark.matrix)
    for name in FEW for format in ("int8", "fp8") for dtype in (jnp.float32, jnp.bfloat16)
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "format", "dtype"), BITS)
def test_attention_over_pages_in_8_bits_equals_a_formula(name, format, dtype, monkeypatch, capsys):
    """On what they hold. Where no token is, scales are NaN, and bytes any: those of e4m3's NaN and -0, too.

    Two pages of tokens in a group, of which four fill a row of scales; latents have a scale for each of 10 parts, in
    16 rows.
    Outputs reach 9; seen: 2e-5, and 0.02 in bfloat16.
    """
    sizes, block, heads, sequences, spec = FEW[name]
    mask = ops.Mask(0.3, **spec)
    c = case(sizes, block, heads, sequences, mask, dtype, sinks=name != "chunks", format=format)
    assert error(monkeypatch, 64, c, mask, name != "chunks") < (3e-5 if dtype == jnp.float32 else 0.05)
    assert "RACE" not in "".join(capsys.readouterr())


WHOLE = [
    ("values", "", jnp.float32, {"window": 250, "softcap": 20.0}, 1e-5),
    ("values", "", jnp.bfloat16, {"chunk": 160}, 0.02),
    ("values", "int8", jnp.float32, {"chunk": 160}, 1e-5),
    ("values", "fp8", jnp.bfloat16, {}, 0.05),
    ("latents", "", jnp.float32, {"window": 250}, 1e-5),
    ("latents", "int8", jnp.bfloat16, {"softcap": 20.0}, 0.05),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "format", "dtype", "spec", "tolerance"),
    [pytest.param(*x, marks=pytest.mark.matrix if i else []) for i, x in enumerate(WHOLE)],
)
def test_a_prompt_s_groups_of_pages_that_all_rows_see_need_no_mask(
    kind, format, dtype, spec, tolerance, monkeypatch, capsys
):
    """Tiles of 16 tokens, eight items, 128 keys in two products; groups with a mask and without one.

    Two sequences share the first tile, whose groups are no whole tile's. Seen: 3e-6, and 0.01 in bfloat16."""
    monkeypatch.setattr(kernel, "TOKENS", 16)
    monkeypatch.setattr(program, "ROWS", 8)
    monkeypatch.setattr(prompt, "KEYS", 64)
    sizes = Sizes(2, 128, 1, 32, 10) if kind == "values" else Sizes(1, 576, 1, 32, 10, 512)
    mask, plain = ops.Mask(0.1, **spec), []
    whole = prompt.whole
    monkeypatch.setattr(prompt, "whole", lambda *a: plain.append(x := whole(*a)) or x)
    c = case(sizes, 8, 4, [(290, 8), (250, 8), (150, 16)], mask, dtype, format=format)
    assert error(monkeypatch, 128, c, mask) < tolerance and plain
    assert "RACE" not in "".join(capsys.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [Sizes(1, 128, 1, 8, 2), Sizes(1, 160, 1, 8, 2, 128)], ids=["values", "latents"])
def test_a_planted_race_is_found(sizes, monkeypatch, capsys):
    """So that no race above means something: nothing waits for the pages."""
    fetch = program._fetch
    monkeypatch.setattr(program, "_fetch", lambda *a, wait=False: None if wait else fetch(*a))
    c = case(sizes, 1, 1, [(16, 1)], ops.Mask(0.3), jnp.float32)
    how, found = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager"), ""
    try:
        error(monkeypatch, 8, c, ops.Mask(0.3), how=how)
    except jax.errors.JaxRuntimeError as e:  # of jax 0.12, which does not only print it
        found = str(e)
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert "RACE DETECTED" in found + "".join(capsys.readouterr())


def test_runs_are_blocks_that_follow_each_other():
    """One of two blocks, one without tokens, one past its table under a window, which sees no page."""
    positions = [*range(4, 12), -1, -1, -1, -1, 40, 41, -1, -1]
    table = jnp.asarray([[0, 1, 2], [0, 1, 2], [7, 7, 7], [3, 4, 5]])
    batch = Paged(jnp.asarray(positions), table, jnp.asarray([0, 0, 7, 1]), 4)
    spans = kernel._spans(batch, ops.Mask(0.1, window=6), 4, 4)
    assert spans.tolist() == [[4, 0, 8, 0, 3], [8, 4, 0, 0, 0], [-1, 8, 0, 0, 0], [40, 12, 2, 3, 3]]


NAMED = pytest.mark.of_cpu("with --target the references are named")
REASONS = [
    ({"platform": "gpu"}, "written for TPUs"),
    ({"dtype": jnp.float16}, "bfloat16 and float32"),
    ({"size": 8}, "pages of 8"),
    ({"dim": 96}, "rows of 96"),
    ({"alibi": jnp.zeros(8)}, "alibi"),
    ({"v_dim": 32}, "values in the first 32 of 128 channels"),
    ({"v_dim": 512, "dim": 576, "row": 576}, "rows of 576"),
    ({"bits": (64, 64)}, "scales in 1 rows of 64"),
    ({"bits": (48, 128)}, "pages of 48 tokens"),
    ({"bits": (64, 128), "dim": 640, "row": 640}, "10 scales a token"),
    pytest.param({"bits": (64, 128), "dim": 512, "row": 512}, None, marks=NAMED),
    ({"width": 2**17}, "a page table of"),
    ({"blocks": 2048, "width": 128}, "a page table of"),
    ({"block": 8192}, "blocks of 8192 tokens"),
    pytest.param({}, None, marks=NAMED),
    pytest.param({"dim": 64}, None, marks=NAMED),
    pytest.param({"dim": 96, "row": 128}, None, marks=NAMED),
    pytest.param({"blocks": 1024, "width": 128}, None, marks=NAMED),
    pytest.param({"blocks": 2048, "width": 64}, None, marks=NAMED),
    pytest.param({"bits": (64, 128)}, None, marks=NAMED),
    pytest.param({"dim": 576, "v_dim": 512}, None, marks=NAMED),
    pytest.param({"dim": 576, "v_dim": 512, "block": 32, "heads": 128}, None, marks=NAMED),
]


@pytest.mark.parametrize(("call", "reason"), REASONS, ids=str)
def test_the_kernel_says_what_it_cannot_serve(call, reason):
    dim, dtype = call.get("dim", 128), call.get("dtype", jnp.bfloat16)
    block, blocks = call.get("block", 1), call.get("blocks", 2)
    q = jax.ShapeDtypeStruct((blocks * block, call.get("heads", 8), dim), dtype)
    row = call.get("row", {64: 128, 576: 640}.get(dim, dim))
    size, lanes = call.get("bits", (call.get("size", 64), 0))
    pages = jax.ShapeDtypeStruct((2, 5, 2, size, row), jnp.int8 if lanes else dtype)
    scales = jax.ShapeDtypeStruct((2, 5, 2, 1, lanes), jnp.float32) if lanes else None
    cache = Pages(pages, None if "v_dim" in call else pages, scales, scales)
    table = jax.ShapeDtypeStruct((blocks, call.get("width", 2)), int)
    batch = Paged(jnp.zeros(blocks * block, int), table, jnp.arange(blocks), block)
    given = dict(mask=ops.Mask(0.1), alibi=call.get("alibi"), v_dim=call.get("v_dim"))
    with tracing_for(call.get("platform", "tpu")):
        if reason is None:
            assert "mosaic: chosen" in ops.explain(paged_attention, batch, cache, 0, q, **given)
        else:
            assert reason in kernel.unsupported(batch, cache, 0, q, **given)


@pytest.mark.parametrize(("rows", "width"), [(1024, 128), (1024, 64), (64, 2560)])
def test_scalars_of_many_rows_fit_their_memory(rows, width, monkeypatch):
    """1 MiB, in which an array has whole tiles of 8 rows of 128: those of 1,024 rows' tables and runs took it all."""
    found = []

    def run(*scalars_and_arrays):
        whole = lambda x: np.prod(
            [*x.shape[:-2], *(-(-n // t) * t for n, t in zip(x.shape[-2:], (8, 128)[-x.ndim :], strict=True))]
        )
        found.extend(4 * whole(x) for x in scalars_and_arrays[:3])
        return jnp.zeros((rows, 2, 8, 128), jnp.bfloat16)

    monkeypatch.setattr(pl, "pallas_call", lambda *_, **__: run)
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    page, q = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 9, 2, 64, 128), (rows, 8, 128)))
    batch, given = Paged(ints(rows), ints(rows, width), ints(rows), 1), dict(mask=ops.Mask(0.1))
    with tracing_for("tpu"), ops.use(paged_attention="mosaic"):
        jax.eval_shape(lambda *x: paged_attention(*x[:2], 0, x[2], **given), batch, Pages(page, page), q)
    assert 0 < sum(found) < 0.8 * 2**20


@pytest.mark.matrix
def test_an_engine_with_the_kernel_draws_the_same_tokens(monkeypatch):
    """Chunks of prompts beside decoding, rows that come and go; interpreted, so the host stands for a TPU."""
    cfg = llama.Config.from_hf(small.CFG.to_hf() | {"head_dim": 128})
    weights = jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x, params.init(llama.spec(cfg), jax.random.key(0)))
    model = models.Model(llama, cfg, params.unstack(weights))
    prompts = [[int(x) for x in np.random.default_rng(n).integers(8, small.VOCAB, n)] for n in (70, 3, 100)]

    def drawn(**settings) -> list:
        shape = dict(rows=2, pages=6, budget=64, batches=(2,))
        engine = serve.Engine(model, serve.Settings(**shape, **settings))
        return [g.tokens for g in engine.generate(prompts, serve.SamplingParams(max_tokens=6, ignore_eos=True))]

    want, interpreted = drawn(), functools.partial(pl.pallas_call, interpret=pltpu.InterpretParams())
    monkeypatch.setattr(kernel, "no_tpu", lambda: None)
    monkeypatch.setattr(pl, "pallas_call", interpreted)
    assert drawn(kernels={"paged_attention": "mosaic"}) == want and all(len(x) == 6 for x in want)
