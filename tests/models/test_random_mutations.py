"""Random one-line faults in the forward pass of each wiring: the parity of its entries must find every one.

A fault is drawn from a seed: a norm or rotation is left out, a sum becomes a difference, a factor or an addend is dropped,
a number is changed, a branch is taken the other way, two arguments or two weights change places.
"""

import ast
import inspect
import itertools
import random
import types
from functools import cache

import numpy as np
import pytest
import suite
import test_omni
import test_qwenvl
import test_sight
import tiny

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch (extra `test`)")

from fdel import models  # noqa: E402

FAULTS, SEED, FOUND = 10, 0, 1e-3
FAMILIES = [n for n in tiny.TINY if ":" not in n]
# What changes nothing that logits show, by a part of its line: what is watched or saved, dtypes, tiny constants.
NEUTRAL = "watch_ checkpoint_name remat astype dtype chunk= isinstance 1e- LATENT_EPS norm_eps".split()
# Lines that only families reach which borrow the function; an index past the end, which is the last one; what pads.
OF_OTHERS = {"mamba": "(y, None, eps)", "mamba2": "gate_first", "gemma4_text": "OWN)) - 1", "llama4": "[-2] // v.merge"}
UNSEEN = ("head", "rename")
CALLS = set("norm rms_norm layer_norm rope rope_interleaved l2norm softplus sigmoid silu exp act".split())

SWAPS = {
    a: b for x, y in (("gate", "up"), ("attn_norm", "mlp_norm"), ("q_norm", "k_norm")) for a, b in ((x, y), (y, x))
}


def places(name: str, tree: ast.Module, source: list[str]) -> list[tuple[str, ast.AST]]:
    """Every (fault, node) of the functions of a family that compute, in order."""
    out, neutral = [], [*NEUTRAL, *filter(None, [OF_OTHERS.get(name)])]
    for f in tree.body:
        if not isinstance(f, ast.FunctionDef) or f.name in UNSEEN or "spec" in f.name:
            continue
        inside = [g for g in ast.walk(f) if isinstance(g, ast.FunctionDef)]  # a block may be made by a function
        if not any(a.arg in ("carry", "params", "h", "x", "q") for g in inside for a in g.args.args):
            continue
        checks = [n for n in ast.walk(f) if isinstance(n, ast.If) and any(isinstance(x, ast.Raise) for x in n.body)]
        checks += [n for n in ast.walk(f) if isinstance(n, ast.JoinedStr)]  # what errors say
        checked = {id(n) for check in checks for n in ast.walk(check)}
        for node in ast.walk(f):
            if (
                id(node) in checked
                or not hasattr(node, "lineno")
                or any(part in source[node.lineno - 1] for part in neutral)
            ):
                continue
            if isinstance(node, ast.Call) and node.args and _name(node.func) in CALLS:
                out.append(("leave out", node))
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
                out += [("change sign", node), ("drop", node)]
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Pow):
                out.append(("drop", node))
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value in SWAPS:
                out.append(("other weight", node))
    return out


def _name(f: ast.expr) -> str:
    return f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "")


class Plant(ast.NodeTransformer):
    """Replace one node."""

    def __init__(self, fault: str, target: ast.AST) -> None:
        self.fault, self.target = fault, target

    def visit(self, node: ast.AST) -> ast.AST:
        if node is not self.target:
            return self.generic_visit(node)
        match self.fault:
            case "leave out":
                return node.args[0]
            case "drop":
                return node.left
            case "change sign":
                return ast.BinOp(node.left, ast.Sub() if isinstance(node.op, ast.Add) else ast.Add(), node.right)
            case _:
                return ast.Subscript(node.value, ast.Constant(SWAPS[node.slice.value]), node.ctx)


@cache
def faults(name: str) -> list[tuple[str, str, types.ModuleType]]:
    """FAULTS of a family: (line, fault, the module with it)."""
    family = models.family(name)
    text = inspect.getsource(family)
    count, out = len(places(name, ast.parse(text), text.splitlines())), []
    for i in random.Random(f"{name} {SEED}").sample(range(count), min(FAULTS, count)):
        tree = ast.parse(text)
        fault, node = places(name, tree, text.splitlines())[i]
        line = f"{node.lineno}: {text.splitlines()[node.lineno - 1].strip()}"
        tree = ast.fix_missing_locations(Plant(fault, node).visit(tree))
        module = types.ModuleType(family.__name__)
        exec(compile(tree, family.__file__, "exec"), module.__dict__)
        out.append((line, fault, module))
    return out


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """name -> the entries of a family."""
    names = lambda name: [n for n in tiny.TINY if n.partition(":")[0] == name]
    return cache(lambda name: [suite.make_case(n, tmp_path_factory.mktemp("case")) for n in names(name)])


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """entry -> a model that sees, and how far the logits of its rows with media are off with another module's code."""

    def find(name):
        directory = tmp_path_factory.mktemp("shown")
        if name == test_omni.NAME:
            c = test_omni.make(directory)
            tokens, batch, real = c.tokens, c.batch, c.real
        elif name in test_qwenvl.FAMILIES:
            c = test_qwenvl.make(name, directory)
            tokens, batch = test_qwenvl.inputs().tokens, test_qwenvl.packed()
            real = np.ones(tokens.shape, bool)
        else:
            c = test_sight.make(name, directory)
            tokens, batch, real = c.tokens, test_sight.batch(c), test_sight.mask(c.lengths)
        look = lambda case: suite.error(np.asarray(suite.full(case.model, tokens, batch))[real], c.logits[real])
        return look, suite.Case(directory, c.model, tokens, c.logits)

    return cache(find)


CI = 1  # faults of each wiring that every run plants; `make matrix` plants all, in all families
DRAWN = [
    pytest.param(name, i, marks=[pytest.mark.slow, *[pytest.mark.matrix] * (i >= CI or not tiny.TINY[name].wiring)])
    for name in FAMILIES
    for i in range(FAULTS)
]


@pytest.mark.parametrize("name,i", DRAWN)
def test_a_random_fault_is_found(cases, shown, name, i):
    if i >= len(faults(name)):
        pytest.skip(f"{name} has {len(faults(name))} places for a fault")
    line, fault, module = faults(name)[i]
    served = lambda case: suite.serving_error(case, 7, 4)
    looks = suite.logits_error, *[served] * tiny.TINY[name].served
    pairs = [(look, case) for look in looks for case in cases(name)]
    entries = [n for n in test_sight.NAMES if n.partition(":")[0] == name] or [name]
    sees = map(shown, entries) if hasattr(models.family(name), "encode") else ()
    worst = 0.0
    for look, case in itertools.chain(sees, pairs):
        try:
            wrong = look(case._replace(model=case.model._replace(family=module)))
        except (TypeError, ValueError, KeyError, AttributeError):  # shapes that do not fit, or no array: found
            return
        if not wrong < FOUND:  # or not a number
            return
        worst = max(worst, wrong)
    raise AssertionError(f"{fault} in {line}: {worst:.1e} off in all entries of {name}")
