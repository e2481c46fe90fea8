"""The section `trainer` of a run file: the keys of all trainer types, and those that some types declare."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fdel.recipe import methods
from fdel.recipe.parse import key

TYPES = tuple(methods.METHODS)


@dataclass(frozen=True)
class Common:
    """Keys of all trainer types; numbers and names as TRL has them."""

    trainer_type: str = key("sft", "what is learnt", choices=TYPES)
    # How long, and on how much.
    num_train_epochs: int | None = key(None, "passes over the data; default: 3, or what max_training_steps need",
        positive=True)  # fmt: skip
    max_training_steps: int | None = key(None, "steps at the most", positive=True)
    total_batch_size: int | None = key(None, "rows of a step on all devices; default: mixture.batch_size, or 32",
        positive=True)  # fmt: skip
    eval_batch_size: int | None = key(None, "rows of a step of evaluation; default: total_batch_size", positive=True)
    gradient_accumulation_steps: int = key(1, "parts of the batch, one after the other; they divide total_batch_size",
        positive=True)  # fmt: skip
    max_length: int | None = key(None, "tokens of a row; default: 1024")
    seed: int = key(42, "of new weights and of rounding")
    trainable: str | tuple[str, ...] | None = key(None, "what is trained whole, beside adapters and a new head; the rest "
        "is frozen. A list: modules, or parts of their names, as multi_modal_projector; else a pattern of whole names; "
        "default: everything, with lora nothing")  # fmt: skip
    # The optimizer.
    learning_rate: float | None = key(None, "peak; default: TRL's for the type", positive=True)
    optimizer: str = key("adamw", "one of train.optim.OPTIMIZERS")
    scheduler: str = key("linear", "one of train.schedules.SCHEDULES")
    warmup_steps: int = key(0, "steps in which the rate rises from 0; all but one at the most")
    warmup_ratio: float | None = key(None, "the same as a share of all steps")
    learning_rate_end: float | None = key(None, "rate that the schedule ends at; default: 0")
    weight_decay: float = key(0.0, "of matrices")
    clip_grad: float | None = key(1.0, "largest norm of the gradient; null: any")
    adam_beta1: float = key(0.9, "of adamw", needs="optimizer", of=("adamw",))
    adam_beta2: float = key(0.999, "of adamw", needs="optimizer", of=("adamw",))
    adam_epsilon: float = key(1e-8, "of adamw", needs="optimizer", of=("adamw",))
    moments: str = key("float32", "dtype of adamw's moments", choices=("float32", "bfloat16", "int8"),
        needs="optimizer", of=("adamw",))  # fmt: skip
    router_bias_update_speed: float = key(0.0, "what a bias that chooses experts moves in a step, against their load, as "
        "DeepSeek-V3's by 0.001; 0: not", least=0)  # fmt: skip
    router_jitter_noise: float | None = key(None, "noise: what routers read is multiplied by numbers from 1 - this to "
        "1 + this in training; default: what the model's config.json says", least=0, most=1)  # fmt: skip
    ema_decay: float | None = key(None, "keep a moving average of the parameters, which is then saved and evaluated")
    skip_nonfinite: bool = key(True, "skip steps whose loss or gradient is not finite")
    gradient_checkpointing: bool | str | None = key(None,
        "what a backward pass saves of a layer, by the policy's name; true: nothing")  # fmt: skip
    disable_dropout: bool | None = key(
        None, "train without the dropout that config.json asks for, which this version has not; default: as in TRL, false "
        f"for {', '.join(methods.types(keeps_dropout=True))}, where it is an error, else true",
    )  # fmt: skip
    debug: bool = key(False, "end with the first token id out of range, or NaN or Inf, and its path; steps are slower")
    # Logging and saving.
    log_steps: int = key(10, "steps between two lines of metrics", positive=True)
    evaluation_steps: int | None = key(None, "steps between two evaluations on mixture.eval_informs", positive=True)
    save_steps: int | None = key(None, "steps between two checkpoints; default: one at the end", positive=True)
    save_directory: str = key("fdel-run", "where metrics, checkpoints and the model go")
    save_total_limit: int | None = key(None, "checkpoints to keep; default: all", positive=True)
    resume_if_possible: bool = key(True, "continue from the last checkpoint in save_directory")
    metric_for_best_model: str | None = key(None,
        "metric of evaluation, such as eval_loss, whose best checkpoint stays")  # fmt: skip
    greater_is_better: bool = key(False, "of metric_for_best_model", needs="metric_for_best_model")
    early_stopping_patience: int | None = key(None, "evaluations without a better metric before training ends",
        needs="metric_for_best_model")  # fmt: skip
    use_wandb: bool = key(False, "log to Weights & Biases too")
    use_tensorboard: bool = key(False, "write TensorBoard events too")


if TYPE_CHECKING:

    class Trainer(Common):
        """What mypy knows: the keys of the types are there, whatever these are."""

        def __init__(self, **keys: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:
    about = {"__module__": __name__, "__doc__": "How the model is trained; numbers and names as TRL has them."}
    Trainer = dataclasses.make_dataclass("Trainer", methods.declared(), bases=(Common,), namespace=about, frozen=True)
