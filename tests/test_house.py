"""Tests that hold the house: budgets, import arrows, forbidden constructs, a light import.

A check reads one parsed file of `fdel/` and yields (line, finding). Each check is itself tested with a snippet that
breaks its rule (`BROKEN`) and with one that looks like it and is allowed (`SOUND`).
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
Findings = Iterator[tuple[int, str]]

FILE_LINES, FUNCTION_LINES, PARAMETERS = 300, 60, 8
# The most lines of a file in fdel/models: 150 for a dense family (the default), 250 with experts or latent attention,
# 350 for a hybrid or several modalities. Files that are not families have the budget of all others.
CONTEXT = ("self", "cls", "batch", "media", "state", "slots", "layer", "impl", "remat")
KNOWN_BY_NAME = {"dpo"}  # every option a keyword that users of TRL know
MODEL_LINES = {
    "code2wav": 250,
    "deepseek_v3": 250,
    "gemma4_text": 250,
    "kimi_linear": 250,
    "mixtral": 250,
    "qwen3_moe": 250,
    "qwen3_next": 350,
    "whisper": 350,
    "whisper_classes": 150,
    **dict.fromkeys(["clip", "kimi_vl", "llama4", "llava", "mistral3", "pixtral", "siglip"], 350),
    **dict.fromkeys(["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v"], 350),
    "qwen3_omni_moe": 350,
    "qwen3_omni_talker": 250,
}
MODEL_LINES |= dict.fromkeys(["builders", "config", "heads", "pooling", "sight", "sublayers"], FILE_LINES)

FAMILIES = {f.stem for f in (ROOT / "fdel" / "models").glob("*.py")}
FAMILIES -= {"__init__", "builders", "config", "heads", "keys", "pooling", "protocol", "rope", "sight", "sublayers"}
FAMILIES -= {"whisper_classes"}
WORDS = {"clip"}  # that numpy means otherwise: a mode of lookups out of range
# The demo's own model; formats of files, of chats and of image processors, which others named.
NAMES_OF_OTHERS = (
    "models",
    "demo",
    "easylm",
    "media.sight",
    "params.gguf",
    "text.gguf",
    "serve.server.reasoning",
    "serve.server.tools",
)

# What each part of the house may import of the house (DESIGN section 2); parts not named here sit on top.
ARROWS = {
    "gguf": ["gguf"],
    "kernels": ["kernels", "ops"],
    "ops": ["kernels", "ops"],
    "params": ["params", "ops.weights", "gguf"],
    "models": ["models", "params", "ops", "gguf"],
    "text": ["text", "gguf"],
    "media": ["media"],
    "serve": ["serve", "params", "ops", "models", "text", "media"],
    "train": ["train", "params", "ops", "models", "serve", "text", "media"],
}
TARGET = "fdel/ops/platform.py"  # says which platform is traced for; what the process runs on is no answer
LAUNCHERS = "fdel/train/processes.py"  # reads who started this process: nothing else says it
# These run without jax and aiohttp.
HOST_ONLY = {
    "gguf",
    "text",
    "media",
    "serve.engine.pages",
    "serve.engine.schedule",
    "serve.server.openai",
    "serve.server.tokenizing",
    "serve.server.worker",
}
NO_TEXT = ("fdel.text", "fdel.serve.server", "fdel.serve.output_text")  # the engine knows token ids only,
FACADE = "serve.engine.engine"  # but for what hands each request its text
OPTIONAL = {
    "PIL",
    "accelerate",
    "av",
    "huggingface_hub",
    "llguidance",
    "matplotlib",
    "orbax",
    "peft",
    "pyarrow",
    "tensorboardX",
    "torch",
}
OPTIONAL |= {
    "jsonschema",
    "lm_eval",
    "math_verify",
    "openai",
    "referencing",
    "soundfile",
    "transformers",
    "wandb",
}  # not in the core install
DEVICE_WORK = (
    r"jax\.(numpy|random|lax|nn)\.|jax\.(jit|pmap|vmap|grad|device_put|devices|local_devices|default_backend)$"
)
NOT_ARRAYS = r"jax\.numpy\.(dtype|finfo|iinfo)$"


# ---- reading a file ------------------------------------------------------------------------------------------------


def part_of(name: str) -> str:
    """`fdel/ops/rope.py` -> `ops.rope`; the package itself is ``."""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".").partition(".")[2]


def imports(name: str, tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Each imported name: line, full dotted name, and the name it gets here."""
    package = ("fdel." + part_of(name)).rstrip(".").split(".")
    if not name.endswith("/__init__.py"):
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                yield node.lineno, a.name, a.asname or a.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            for a in node.names:
                yield node.lineno, ".".join([*base, *filter(None, [node.module]), a.name]), a.asname or a.name


def resolver(name: str, tree: ast.AST) -> Callable[[ast.AST], str]:
    """Return a function that spells out an attribute chain: `jnp.zeros` -> `jax.numpy.zeros`; "" if it is none."""
    full = {short: long for _, long, short in imports(name, tree) if "." in long and long.partition(".")[0] != short}

    def spell(node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            base = spell(node.value)
            return f"{base}.{node.attr}" if base else ""
        return full.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    return spell


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs when a module is imported: all but the bodies of functions (defaults and decorators do run)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            outside = [*child.decorator_list, *child.args.defaults, *filter(None, child.args.kw_defaults)]
        elif isinstance(child, ast.Lambda):
            outside = [*child.args.defaults, *filter(None, child.args.kw_defaults)]
        else:
            yield child
            yield from run_at_import(child)
            continue
        for part in outside:
            yield part
            yield from run_at_import(part)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods, nested ones too."""
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


# ---- the checks ----------------------------------------------------------------------------------------------------


def long_file(name: str, tree: ast.Module, source: str) -> Findings:
    """Keep files readable in one sitting."""
    part, lines = part_of(name), source.count("\n")
    most = MODEL_LINES.get(part.partition(".")[2], 150) if part.startswith("models.") else FILE_LINES
    if lines > most:
        yield lines, f"{lines} lines, the budget is {most}"


def long_function(name: str, tree: ast.Module, source: str) -> Findings:
    """Keep functions to 60 lines and 8 parameters, besides those of where a call stands and how it computes (`CONTEXT`)."""
    for f in functions(tree):
        lines = (f.end_lineno or f.lineno) - f.lineno + 1
        if lines > FUNCTION_LINES:
            yield f.lineno, f"{f.name} has {lines} lines, the budget is {FUNCTION_LINES}"
        a = f.args
        count = len([x for x in a.posonlyargs + a.args + a.kwonlyargs if x.arg not in CONTEXT])
        if count > PARAMETERS and f.name not in KNOWN_BY_NAME:
            yield f.lineno, f"{f.name} has {count} parameters, the budget is {PARAMETERS}"


def arrows(name: str, tree: ast.Module, source: str) -> Findings:
    """Import only what stands below in the house."""
    part = part_of(name)
    allowed = [f"fdel.{p}" for p in ARROWS.get(part.partition(".")[0], [""])]
    for line, target, _ in imports(name, tree):
        if target.partition(".")[0] == "fdel" and part and allowed != ["fdel."]:
            if not any(f"{target}.".startswith(f"{p}.") for p in allowed):
                yield line, f"imports {target}; {part.partition('.')[0]} may import {', '.join(allowed)}"
        if part.startswith("serve.engine.") and part != FACADE and target.startswith(NO_TEXT):
            yield line, f"imports {target}; the engine knows token ids only, and text is given with a request"
        if any(f"{part}.".startswith(f"{p}.") for p in HOST_ONLY) and target.partition(".")[0] in {
            "jax",
            "jaxlib",
            "jaxtyping",
            "optax",
            "aiohttp",
        }:
            yield line, f"imports {target}; {part} must run without it"


def optional_import(name: str, tree: ast.Module, source: str) -> Findings:
    """Import packages of the extras in the function that needs them."""
    top = ast.Module([n for n in run_at_import(tree) if isinstance(n, ast.Import | ast.ImportFrom)], [])
    for line, target, _ in imports(name, top):
        if target.partition(".")[0] in OPTIONAL:
            yield line, f"imports {target} at module level, which the core install lacks; import it in the function"


def _kept(handler: ast.ExceptHandler) -> bool:
    """Whether what is caught is raised again, logged, or handed on by its name, which to print it is not."""
    calls = [n for n in ast.walk(handler) if isinstance(n, ast.Call) and ast.unparse(n.func) == "print"]
    printed = {id(n) for call in calls for n in ast.walk(call)}
    return any(
        isinstance(n, ast.Raise)
        or (isinstance(n, ast.Attribute) and ast.unparse(n) == "log.exception")
        or (isinstance(n, ast.Name) and n.id == handler.name and id(n) not in printed)
        for n in ast.walk(handler)
    )


def forbidden(name: str, tree: ast.Module, source: str) -> Findings:
    """Reject constructs that are unsafe, private, or hide what happens."""
    spell = resolver(name, tree)
    for line, target, _ in imports(name, tree):
        if target.startswith("jax._src") or target.partition(".")[0] in {"pickle", "dill", "cloudpickle", "marshal"}:
            yield line, f"imports {target}"
        if target in {"os.environ", "os.getenv"} and name != LAUNCHERS:
            yield line, f"imports {target}; settings are arguments, not environment variables"
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Assert):
            yield line, "assert; raise an error that says what was found, expected, and what to change"
        elif isinstance(node, ast.Global):
            yield line, "global; state is passed and returned"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
            yield line, node.func.id
        elif isinstance(node, ast.Call) and spell(node.func) == "torch.load":
            if not any(k.arg == "weights_only" and getattr(k.value, "value", 0) is True for k in node.keywords):
                yield line, "torch.load without weights_only=True runs code from the file"
        elif isinstance(node, ast.Attribute | ast.Name) and spell(node) == "jax.default_backend" and name != TARGET:
            yield line, "jax.default_backend; ask ops.platform.target, which a mesh or a test can set"
        elif isinstance(node, ast.Attribute) and spell(node) == "jax._src":
            yield line, "jax._src"
        elif isinstance(node, ast.Attribute) and spell(node) in {"os.environ", "os.getenv"} and name != LAUNCHERS:
            yield line, f"{spell(node)}; settings are arguments, not environment variables"
        elif isinstance(node, ast.keyword | ast.arg) and node.arg in {"trust_remote_code", "allow_pickle"}:
            yield line, node.arg
        elif isinstance(node, ast.ExceptHandler):
            broad = node.type is None or spell(node.type) in {"Exception", "BaseException"}
            if broad and not _kept(node):
                yield line, "an except that hides errors; name the exception, hand it on, log it, or raise again"


def names(name: str, tree: ast.Module, source: str) -> Findings:
    """Name things for what they are."""
    if re.search(r"(^|/)_?(utils?|helpers?|common|misc)(\.py|/)", name):
        yield 1, "a module without a subject; put each function where its subject lives"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and re.search(r"(Manager|Helper|Utils?|Handler)$", node.name):
            yield node.lineno, f"class {node.name}; name it for what it is"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "gpu.kernel":
            if not any(k.arg == "kernel_name" for k in node.keywords):
                yield node.lineno, "a kernel without kernel_name, which profiles call anonymous"


def work_at_import(name: str, tree: ast.Module, source: str) -> Findings:
    """Make no array, start no backend and jit nothing while a module is imported."""
    spell = resolver(name, tree)
    for node in run_at_import(tree):
        used = spell(node.func) if isinstance(node, ast.Call) else ""
        if re.match(DEVICE_WORK, used) and not re.match(NOT_ARRAYS, used):
            yield node.lineno, f"calls {used} at import"
    for f in functions(tree):
        if f in tree.body or any(isinstance(c, ast.ClassDef) and f in c.body for c in ast.walk(tree)):
            if any("jax.jit" in map(spell, ast.walk(d)) for d in f.decorator_list):
                yield f.lineno, f"{f.name} is decorated with jit; only the outermost program is jitted, by its caller"


def docstrings(name: str, tree: ast.Module, source: str) -> Findings:
    """Document every module, public class and public function."""
    if tree.body and not ast.get_docstring(tree):
        yield 1, "the module has no docstring"

    def walk(body: list[ast.stmt]) -> Findings:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
                if not ast.get_docstring(node):
                    yield node.lineno, f"{node.name} has no docstring"
                if isinstance(node, ast.ClassDef):
                    yield from walk(node.body)

    yield from walk(tree.body)


def no_family(name: str, tree: ast.Module, source: str) -> Findings:
    """Know no family by name outside of its file: a new one is that file and its entry in the suite."""
    if any(f"{part_of(name)}.".startswith(f"{part}.") for part in NAMES_OF_OTHERS):
        return
    for line, target, _ in imports(name, tree):
        if target.startswith("fdel.models.") and target.split(".")[2] in FAMILIES:
            yield line, f"imports {target}; take the family as an argument"
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in FAMILIES - WORDS:
            yield node.lineno, f"names {node.value!r}; what is special about a family stands in its file"


CHECKS = [long_file, long_function, arrows, optional_import, forbidden, names, work_at_import, docstrings, no_family]


def findings(check: Callable, name: str, source: str) -> list[str]:
    """Run one check over one source text."""
    return [f"{name}:{line}: {what}" for line, what in check(name, ast.parse(source), source)]


# ---- the checks hold, and find what they should --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_house(check: Callable) -> None:
    files = sorted((ROOT / "fdel").rglob("*.py"))
    assert files
    found = [f for p in files for f in findings(check, p.relative_to(ROOT).as_posix(), p.read_text("utf-8"))]
    assert not found, f"{check.__doc__}\n" + "\n".join(found)


BROKEN = [
    (no_family, "fdel/serve/engine/a.py", "def f(cfg): return cfg.model_type == 'granite'"),
    (no_family, "fdel/train/a.py", "def f():\n    from fdel.models import llama"),
    (long_file, "fdel/ops/a.py", "x = 1\n" * 301),
    (long_file, "fdel/models/llama.py", "x = 1\n" * 151),
    (long_file, "fdel/models/mixtral.py", "x = 1\n" * 251),
    (long_function, "fdel/a.py", "def f():\n" + "    x = 1\n" * 60),
    (long_function, "fdel/a.py", "class A:\n    def f(self, a, b, c, d, e, f, *, g, h, i): pass"),
    (arrows, "fdel/ops/a.py", "from fdel.params import spec"),
    (arrows, "fdel/ops/a.py", "from .. import models"),
    (arrows, "fdel/ops/__init__.py", "from ..models import llama"),
    (arrows, "fdel/ops/a.py", "import fdel"),
    (arrows, "fdel/kernels/a.py", "def f():\n    from fdel import text"),
    (arrows, "fdel/params/a.py", "from fdel.ops import rope"),
    (arrows, "fdel/params/a.py", "from fdel.ops.weightless import a"),
    (arrows, "fdel/models/a.py", "import fdel.serve.generation"),
    (arrows, "fdel/serve/a.py", "from fdel import train"),
    (arrows, "fdel/train/a.py", "from fdel.cli import main"),
    (arrows, "fdel/text.py", "from fdel.ops import rope"),
    (arrows, "fdel/text.py", "import jax.numpy as jnp"),
    (arrows, "fdel/text/chat.py", "from jax import numpy"),
    (arrows, "fdel/serve/engine/reply.py", "from fdel import text"),
    (arrows, "fdel/serve/engine/pages.py", "def f():\n    import aiohttp"),
    (optional_import, "fdel/params/hf.py", "from huggingface_hub import snapshot_download"),
    (optional_import, "fdel/cli.py", "try:\n    import torch\nexcept ImportError: torch = None"),
    (forbidden, "fdel/a.py", "from jax._src import core"),
    (forbidden, "fdel/a.py", "import jax\njax._src.core.Tracer"),
    (forbidden, "fdel/ops/a.py", "import jax\njax.default_backend()"),
    (forbidden, "fdel/ops/a.py", "from jax import default_backend\ndefault_backend()"),
    (forbidden, "fdel/a.py", "import pickle"),
    (forbidden, "fdel/a.py", "eval('1')"),
    (forbidden, "fdel/a.py", "def f(): exec('1')"),
    (forbidden, "fdel/a.py", "def f(x): assert x > 0"),
    (forbidden, "fdel/a.py", "load('x', trust_remote_code=False)"),
    (forbidden, "fdel/a.py", "import numpy as np\nnp.load('x', allow_pickle=True)"),
    (forbidden, "fdel/a.py", "def f():\n    import torch\n    torch.load('x', weights_only=False)"),
    (forbidden, "fdel/a.py", "import os\nos.environ['X']"),
    (forbidden, "fdel/a.py", "from os import environ"),
    (forbidden, "fdel/a.py", "def f():\n    global x\n    x = 1"),
    (forbidden, "fdel/a.py", "try: f()\nexcept: x = 1"),
    (forbidden, "fdel/a.py", "try: f()\nexcept Exception as e: print(e)"),
    (names, "fdel/a.py", "class PageManager: pass"),
    (names, "fdel/ops/utils.py", ""),
    (work_at_import, "fdel/a.py", "import jax.numpy as jnp\nx = jnp.zeros(3)"),
    (work_at_import, "fdel/a.py", "from jax import numpy\nclass A:\n    x: int = numpy.float32(3)"),
    (work_at_import, "fdel/a.py", "import jax\ndef f(key=jax.random.key(0)): pass"),
    (work_at_import, "fdel/a.py", "import jax\nf = jax.jit(lambda x: x)"),
    (work_at_import, "fdel/a.py", "from jax import jit\n@jit\ndef f(x): return x"),
    (
        work_at_import,
        "fdel/a.py",
        "import jax, functools\n@functools.partial(jax.jit, donate_argnums=0)\ndef f(x): pass",
    ),
    (names, "fdel/kernels/a_gpu.py", "run = gpu.kernel(program, out_type=out)"),
    (docstrings, "fdel/a.py", "x = 1"),
    (docstrings, "fdel/a.py", "'''A.'''\ndef f(): pass"),
    (docstrings, "fdel/a.py", "'''A.'''\nclass A:\n    '''A.'''\n    def f(self): pass"),
]


@pytest.mark.parametrize(("check", "name", "source"), BROKEN)
def test_check_finds(check: Callable, name: str, source: str) -> None:
    assert len(findings(check, name, source)) == 1


SOUND = [
    (no_family, "fdel/recipe/a.py", "'as granite does it'\nfrom fdel.models import heads"),
    (no_family, "fdel/models/a.py", "from fdel.models import llama"),
    (long_file, "fdel/models/qwen3_next.py", "x = 1\n" * 350),
    (long_file, "fdel/models/__init__.py", "x = 1\n" * 300),
    (long_function, "fdel/a.py", "class A:\n    def f(self, a, b, c, d, e, f, g, *, h): pass"),
    (arrows, "fdel/params/a.py", "from fdel.ops.weights import Quantized\nfrom ..ops import weights"),
    (forbidden, TARGET, "import jax\njax.default_backend()"),
    (forbidden, LAUNCHERS, "import os\nos.environ['RANK']"),
    (arrows, "fdel/train/a.py", "from ..serve import generate\nfrom .steps import grads"),
    (arrows, "fdel/cli.py", "import fdel, jax\nfrom fdel import train, serve"),
    (optional_import, "fdel/params/hf.py", "def f():\n    import torch"),
    (forbidden, "fdel/a.py", "import torch\ntorch.load('x', weights_only=True)\nmodel.eval()\nre.compile('x')"),
    (forbidden, "fdel/a.py", "try: f()\nexcept KeyError: pass\nexcept Exception as e: raise ValueError from e"),
    (
        work_at_import,
        "fdel/a.py",
        "import jax.numpy as jnp\nD = jnp.dtype('int8')\nf = lambda x: jnp.zeros(x)\nk = jnp.exp",
    ),
    (
        work_at_import,
        "fdel/a.py",
        "import jax\ndef f(n):\n    @jax.jit\n    def g(x): return jax.numpy.ones(n)\n    return g",
    ),
    (docstrings, "fdel/a.py", "'''A.'''\ndef _f(): pass\ndef f():\n    '''F.'''\n    def g(): pass"),
]


@pytest.mark.parametrize(("check", "name", "source"), SOUND)
def test_check_allows(check: Callable, name: str, source: str) -> None:
    assert findings(check, name, source) == []


# ---- import circles ------------------------------------------------------------------------------------------------


def circles(sources: dict[str, str]) -> list[tuple[str, ...]]:
    """List the parts of the house that import each other, in a round: in functions and for type checkers, too."""
    parts = {part_of(name) for name in sources}
    arrows: dict[str, set[str]] = {part: set() for part in parts}
    for name, source in sources.items():
        for _, target, _ in imports(name, ast.parse(source)):
            part = target.removeprefix("fdel").removeprefix(".") if target.partition(".")[0] == "fdel" else ""
            while part and part not in parts:
                part = part.rpartition(".")[0]
            arrows[part_of(name)] |= {part} - {"", part_of(name)}

    def reached(part: str) -> set[str]:
        found, left = set(), list(arrows[part])
        while left:
            if (new := left.pop()) not in found:
                found.add(new)
                left += arrows[new]
        return found

    every = {part: reached(part) for part in parts}
    return sorted({tuple(sorted(p for p in parts if p in every[q] and q in every[p])) for q in parts if q in every[q]})


def test_no_import_circles() -> None:
    files = (ROOT / "fdel").rglob("*.py")
    found = circles({p.relative_to(ROOT).as_posix(): p.read_text("utf-8") for p in files})
    assert found == []


def test_circles_are_found() -> None:
    sources = {
        "fdel/a/__init__.py": "from fdel.a import b",
        "fdel/a/b.py": "import jax\nif TYPE_CHECKING:\n    from fdel.c import C",
        "fdel/c.py": "def f():\n    from fdel import d\n",
        "fdel/d.py": "from fdel.a.b import x\nfrom fdel.e import y",
        "fdel/e.py": "from fdel import e",
    }
    assert circles(sources) == [("a.b", "c", "d")]
    assert circles(sources | {"fdel/d.py": "import fdel.e"}) == []


# ---- importing -----------------------------------------------------------------------------------------------------


def python(code: str, **env: str) -> str:
    """Run code in a new interpreter and return what it prints."""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.slow
def test_import_is_light() -> None:
    """`import fdel`, with the parts that every model needs, adds at most 0.3 s of CPU to `import jax` (best of three)."""
    code = """
import jax, time
start = time.process_time()
import fdel, fdel.models, fdel.ops, fdel.params
print(time.process_time() - start)
"""
    assert min(float(python(code)) for _ in range(3)) < 0.3


@pytest.mark.slow
def test_import_starts_no_backend() -> None:
    """Any use of a device fails under a platform that does not exist; the last lines prove that it would."""
    code = """
import importlib, pkgutil, fdel, jax
for m in pkgutil.walk_packages(fdel.__path__, "fdel."):
    importlib.import_module(m.name)
try:
    jax.devices()
except RuntimeError:
    print("imported without a backend")
"""
    assert python(code, JAX_PLATFORMS="nowhere") == "imported without a backend"


def test_text_needs_no_jax() -> None:
    assert python("import sys, fdel.text; print('jax' in sys.modules)") == "False"


def test_submodules_load_on_use() -> None:
    code = "import fdel, sys; print('jax' in sys.modules, fdel.params.__name__, 'ops' in dir(fdel))"
    assert python(code) == "False fdel.params True"
    with pytest.raises(AttributeError, match="'layers'; its submodules are kernels, models"):
        __import__("fdel").layers  # noqa: B018


# ---- the tracked files ---------------------------------------------------------------------------------------------

MACHINE_PATH = re.compile(r"(?<![\w.~])/(tmp|work|root|farm|home|opt)/(?!(fdel|x|out|model|data)\b)[\w.-]+")


def test_no_path_of_a_machine() -> None:
    """Files name no path of the machine they were written on (made-up ones, such as /tmp/model, may stay)."""
    assert MACHINE_PATH.search("see /" + "work/main") and not MACHINE_PATH.search("https://x.org/work/a /tmp/out")
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout, so there is no list of tracked files")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and b"\0" not in (data := path.read_bytes()):
            lines = enumerate(data.decode("utf-8", "replace").splitlines(), 1)
            found += [f"{name}:{i}: {m.group()}" for i, line in lines if (m := MACHINE_PATH.search(line))]
    assert not found, "\n".join(found)


# The families that came after the first nine, and those of them that are more than a decoder with a feed-forward: experts,
# states, an encoder, latent attention, several kinds of layers or of heads.
LATER = (
    "llama4_text qwen2 qwen2_moe qwen3_5_text qwen3_5_moe_text mistral ministral3 gemma gemma2 gemma4_text deepseek_v2 "
    "kimi_linear glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa phi phi3 phimoe opt gpt_neox gpt_j gpt_oss mamba "
    "falcon_mamba falcon_h1 rwkv arctic cohere cohere2 dbrx exaone exaone4 falcon grok_1 internlm2 internlm3 mpt olmo "
    "olmo2 olmo3 openelm seed_oss smollm3 stablelm xerxes xerxes2 minimax roberta gidd"
).split()
LARGE = set(
    "arctic dbrx falcon falcon_h1 gemma2 gemma4_text gidd glm_moe_dsa gpt_oss kimi_linear llama4_text mamba minimax "
    "openelm opt qwen2_moe roberta rwkv xerxes xerxes2".split()
)


def test_families_stay_short():
    """All of them together 3,500 lines, and a plain one 60."""
    lines = {n: (ROOT / "fdel" / "models" / f"{n}.py").read_text().count("\n") for n in LATER}
    assert sum(lines.values()) <= 3500
    assert {name for name, n in lines.items() if n > 60} <= LARGE
