"""What training costs: the chunked head, LoRA and QLoRA, and what eight devices send each other. CPU, float32.

    python benchmarks/train.py [head] [lora] [collectives] [--out FILE.md]

head: time and temporary memory of the loss and its gradients against full logits, V = 128256, all in this run, in turn.
Seconds are those of all cores, the least of several, so that other work on the machine counts little.
lora: what a step of the 125M Llama of benchmarks/model.py holds, full, LoRA and QLoRA, read from the compiled step.
collectives: calls and MiB per step and device on ten meshes, read from the compiled step of the same model.
"""

import argparse
import time
from pathlib import Path

CONFIG = dict(model_type="llama", vocab_size=32000, hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
              num_key_value_heads=4, intermediate_size=2048, max_position_embeddings=2048)  # fmt: skip
MESHES = ["dp=8", "fsdp=8", "tp=4,dp=2", "sp=8", "dp=2,fsdp=2,tp=2", "fsdp=2,sp=4", "dp=2,sp=2,tp=2", "dp=4,tp=2",
          "fsdp=4,tp=2", "fsdp=2,tp=2,sp=2"]  # fmt: skip


def table(header: tuple, rows: list[tuple]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def head(tokens: int = 2048, width: int = 512, vocab: int = 128256, chunk: int = 256) -> str:
    import jax
    import jax.numpy as jnp

    from fdel import ops
    from fdel.train import losses

    key = jax.random.key(0)
    x = jax.random.normal(key, (1, tokens, width))
    w = jax.random.normal(key, (vocab, width)) * 0.02
    labels = jax.random.randint(key, (1, tokens), 0, vocab)
    ones = jnp.ones((1, tokens))

    def full(x, w):
        return losses.nll(losses.stats.from_logits(ops.logits(x, ops.Head(w)), labels), ones)[0]

    def plain(x, w):
        logp = jax.nn.log_softmax(ops.logits(x, ops.Head(w)))
        return -jnp.take_along_axis(logp, labels[..., None], -1).sum()

    sides = {
        "full logits, log-softmax only": plain,
        "full logits, all statistics": full,
        "`token_sum` (SFT)": lambda x, w: losses.token_sum(losses.nll, x, ops.Head(w), labels, ones, chunk=chunk)[0],
        "`token_stats` (DPO and others)": lambda x, w: (
            -losses.token_stats(x, ops.Head(w), labels, chunk=chunk).logp.sum()
        ),
    }
    programs = {name: jax.jit(jax.value_and_grad(f, (0, 1))).lower(x, w).compile() for name, f in sides.items()}
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(2):
        for name, run in programs.items():
            begin = time.process_time()
            jax.block_until_ready(run(x, w))
            best[name] = min(best[name], time.process_time() - begin)
    memory = {name: p.memory_analysis().temp_size_in_bytes / 2**20 for name, p in programs.items()}
    base = "full logits, log-softmax only"
    rows = [
        (
            name,
            f"{best[name]:.2f}",
            f"{best[name] / best[base]:.2f}",
            f"{memory[name]:,.0f}",
            f"{memory[name] / memory[base]:.2f}",
        )
        for name in sides
    ]
    title = f"{tokens} tokens, {chunk} at a time, width {width}, vocabulary {vocab}: loss and gradients in both"
    return title + "\n\n" + table(("", "CPU s", "x", "temporary MiB", "x"), rows)


def lora() -> str:
    import jax
    import jax.numpy as jnp

    from fdel import params, train
    from fdel.models import llama
    from fdel.train import losses

    cfg = llama.Config.from_hf(CONFIG)
    spec, optimizer = llama.spec(cfg), train.optim.adamw(1e-4)
    loss, key = losses.sft(llama, cfg), jax.random.key(0)
    base = lambda: params.init(spec, key, dtype=jnp.float32)
    add = lambda p: params.lora.split(params.lora.add(p, 8, 16.0, key=key, spec=spec))
    parts = {
        "full": lambda: (base(), {}),
        "LoRA, rank 8": lambda: (lambda t: (t[0], {"base": t[1]}))(add(base())),
        "QLoRA, NF4, rank 8": lambda: (lambda t: (t[0], {"base": t[1]}))(
            add(params.quantize(base(), "nf4", spec=spec))
        ),
    }
    batch = {"tokens": jax.ShapeDtypeStruct((4, 512), jnp.int32)}
    rows = []
    for name, make in parts.items():
        trainable, given = jax.eval_shape(make)
        f = losses.on_adapters(loss, reference=False) if given else loss
        step = train.update(train.normalize(train.grads(f)), optimizer)
        state = jax.eval_shape(lambda t: train.init_state(t, optimizer), trainable)
        memory = jax.jit(step, donate_argnums=0).lower(state, batch, **given).compile().memory_analysis()
        held, temporary = memory.argument_size_in_bytes / 2**20, memory.temp_size_in_bytes / 2**20
        rows.append((name, f"{held:,.0f}", f"{temporary:,.0f}", f"{held + temporary:,.0f}"))
    header = ("125M Llama, 4 x 512", "parameters and optimizer MiB", "temporary MiB", "sum MiB")
    return table(header, rows)


def collectives() -> str:
    from collections import Counter

    from fdel import plan
    from fdel.models import llama

    cfg = llama.Config.from_hf(CONFIG)
    rows = []
    for mesh in MESHES:
        training = plan.Training(mesh, rows=16, length=512, microbatches=2, dtype="float32")
        program, given = plan.compile_step(llama, cfg, training)
        calls, sent = Counter(), Counter()
        for c in plan.collectives(program.as_text()):
            calls[c.kind] += c.count
            sent[c.kind] += c.moved / 2**20
        cells = [f"{calls[k]} / {sent[k]:,.0f}" if calls[k] else "" for k in plan.KINDS]
        held = sum(given.values()) / 2**20
        rows.append((mesh, *cells, f"{held:,.0f}", f"{program.memory_analysis().temp_size_in_bytes / 2**20:,.0f}"))
    title = "125M Llama, 16 x 512 tokens in 2 microbatches, per step and device: calls / MiB sent on a ring"
    header = ("mesh", *plan.KINDS, "held MiB", "temporary MiB")
    return title + "\n\n" + table(header, rows)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measures = {"head": head, "lora": lora, "collectives": collectives}
    cli.add_argument("measures", nargs="*", default=list(measures), help="(default: all)")
    cli.add_argument("--out", type=Path, help="also write the tables here")
    args = cli.parse_args()
    import jax

    jax.config.update("jax_num_cpu_devices", 8 if "collectives" in args.measures else 1)
    text = "\n\n".join(f"## {name}\n\n{measures[name]()}" for name in args.measures)
    when = f"{time.strftime('%Y-%m-%d')}, jax {jax.__version__}, CPU, float32"
    text = f"{when}. `python benchmarks/train.py {' '.join(args.measures)}`\n\n{text}\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
