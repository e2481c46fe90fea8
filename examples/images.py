"""Fine-tune a model that sees: the tower frozen, LoRA on the text, the projector whole. Run: python examples/images.py"""

import jax
import jax.numpy as jnp
import numpy as np

from fdel import ops, params, train
from fdel.media import clip, sight
from fdel.models import llava
from fdel.train import losses

IMAGE, COLORS = 20, np.eye(3) * 255  # the token in whose place an image stands; red, green and blue are tokens 10 to 12
vision = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
)
text = dict(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            rms_norm_eps=1e-5, head_dim=8)  # fmt: skip
cfg = llava.Config.from_hf({"vision_config": vision, "text_config": text, "image_token_index": IMAGE})
spec = llava.spec(cfg)
base = jax.jit(lambda key: params.init(spec, key))(jax.random.key(0))
base = params.lora.add(base, 4, 8.0, r"^(layers|embed|head)", key=jax.random.key(1), spec=spec)
adapters, frozen = params.lora.split({k: v for k, v in base.items() if k != "projector"})

see = sight.Sight("llava", "clip_vision_model", IMAGE, (IMAGE,), clip.Settings(IMAGE, 8, size=(16, 16)))
rng = np.random.default_rng(0)
answer = rng.integers(0, 3, 24)
images = [np.uint8(np.clip(COLORS[c] + rng.normal(0, 30, (20, 24, 3)), 0, 255)) for c in answer]
pictures = [[sight.prepare(see, x)] for x in images]
rows = [sight.expand(see, [1, IMAGE, 3, 10 + c], p) for c, p in zip(answer, pictures, strict=True)]
values, places, index = sight.gather(see, pictures, np.array([r.index for r in rows]))
batch = {"tokens": jnp.array([r.tokens for r in rows]), "media": ops.Media(index, inputs=ops.Patches(values, places))}
batch |= {"mask": jnp.arange(len(rows[0].tokens)) == jnp.full((24, 1), len(rows[0].tokens) - 1)}  # the answer alone

loss = losses.sft(llava, cfg)
joined = lambda p, base: params.lora.join(p["adapters"], base) | {"projector": p["projector"]}
g = train.accumulate(train.grads(lambda p, batch, given: loss(joined(p, given["base"]), batch)), 2)
optimizer = train.optim.adamw(1e-2)
step = jax.jit(train.update(train.normalize(g), optimizer), donate_argnums=0)
state = train.init_state({"adapters": adapters, "projector": base["projector"]}, optimizer)
for i in range(30):
    state, metrics = step(state, batch, base=frozen)
    print(f"step {i}: loss {metrics['loss']:.4f}, accuracy {metrics['mean_token_accuracy']:.2f}")
