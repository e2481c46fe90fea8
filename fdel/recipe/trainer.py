"""The section `trainer` of a run file: how the model is trained, and what each type of trainer reads."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Default learning rates, those of TRL.
RATES = {
    "sft": 2e-5, "dpo": 1e-6, "cpo": 1e-6, "simpo": 1e-6, "orpo": 1e-6, "kto": 1e-6, "bco": 5e-7, "reward": 1e-4,
    "distillation": 2e-5, "gkd": 2e-5, "prm": 1e-5, "embedding": 2e-5,
}  # fmt: skip
TYPES = tuple(RATES)
LATER = ("grpo",)
PAIRS = ("dpo", "cpo", "simpo", "orpo")
REFERENCE = ("dpo", "kto", "bco")  # compare with a reference model
TEACHER = ("distillation", "gkd")
TEXT = ("sft", *TEACHER)
KEEPS_DROPOUT = ("sft", "distillation", "embedding")  # where TRL does not switch dropout off by itself
HEADED = ("reward", "prm")  # have a head of their own in place of the output projection, and train all weights


def key(
    default: Any,
    doc: str,
    *,
    choices: Sequence = (),
    honours: Sequence = (),
    refuse: str = "",
    by: Sequence[str] = (),
    needs: str = "",
    of: Sequence[str] = (),
) -> Any:
    """Declare a key of a run file.

    `choices` are the values that exist. With `refuse`, the reason, only the default and the values in `honours` can be
    honoured. `by` names the trainer types that read the key; none: all. `needs` is another key of the section without
    which nothing reads this one: it has to be set, or to be one `of` some values.
    """
    meta = {"doc": doc, "choices": tuple(choices), "honours": tuple(honours), "refuse": refuse, "by": tuple(by)}
    return dataclasses.field(default=default, metadata=meta | {"needs": needs, "of": tuple(of)})


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters, the names as PEFT's; the rest of the model is frozen."""

    r: int = key(16, "rank")
    lora_alpha: float = key(32.0, "scale: the update is lora_alpha / r times the product")
    target_modules: str | tuple[str, ...] = key(
        "all-linear",
        "all-linear: the matrices of layers; a list: names of modules, as q_proj; else a pattern of whole names",
    )
    use_rslora: bool = key(False, "lora_alpha / sqrt(r) instead")
    merge: bool = key(False, "save the merged model too, beside the adapters")


@dataclass(frozen=True)
class Trainer:
    """How the model is trained; numbers and names as TRL has them."""

    trainer_type: str = key("sft", "what is learnt", choices=TYPES + LATER, honours=TYPES, refuse="not in this version")
    # How long, and on how much.
    num_train_epochs: int | None = key(None, "passes over the data; default: 3, or what max_training_steps need")
    max_training_steps: int | None = key(None, "steps at the most")
    total_batch_size: int | None = key(None, "rows of a step on all devices; default: mixture.batch_size, or 32")
    eval_batch_size: int | None = key(None, "rows of a step of evaluation; default: total_batch_size")
    gradient_accumulation_steps: int = key(1, "parts of the batch, one after the other; they divide total_batch_size")
    max_length: int | None = key(None, "tokens of a row; default: 1024")
    max_prompt_length: int | None = key(
        None, "tokens of a prompt, which loses its start; default: any", by=(*PAIRS, "kto", "bco")
    )
    max_completion_length: int | None = key(
        None, "tokens of a completion, which loses its end; default: any", by=(*PAIRS, "kto", "bco")
    )
    seed: int = key(42, "of new weights and of rounding")
    # The optimizer.
    learning_rate: float | None = key(None, "peak; default: TRL's for the type")
    optimizer: str = key("adamw", "one of train.OPTIMIZERS")
    scheduler: str = key("linear", "one of train.SCHEDULES")
    warmup_steps: int = key(0, "steps in which the rate rises from 0; all but one at the most")
    warmup_ratio: float | None = key(None, "the same as a share of all steps")
    learning_rate_end: float | None = key(None, "rate that the schedule ends at; default: 0")
    weight_decay: float = key(0.0, "of matrices")
    clip_grad: float | None = key(1.0, "largest norm of the gradient; null: any")
    adam_beta1: float = key(0.9, "of adamw", needs="optimizer", of=("adamw",))
    adam_beta2: float = key(0.999, "of adamw", needs="optimizer", of=("adamw",))
    adam_epsilon: float = key(1e-8, "of adamw", needs="optimizer", of=("adamw",))
    moments: str = key(
        "float32", "dtype of adamw's moments", choices=("float32", "bfloat16", "int8"), needs="optimizer", of=("adamw",),
    )  # fmt: skip
    ema_decay: float | None = key(None, "keep a moving average of the parameters, which is then saved and evaluated")
    skip_nonfinite: bool = key(True, "skip steps whose loss or gradient is not finite")
    gradient_checkpointing: bool | str | None = key(
        None, "what a backward pass saves of a layer, by the policy's name; true: nothing"
    )
    lora: Lora | None = key(
        None, "train adapters only; {} has all defaults", by=tuple(t for t in TYPES if t not in HEADED)
    )
    disable_dropout: bool | None = key(
        None, "train without the dropout that config.json asks for, which this version has not; default: as in TRL, false "
        f"for {', '.join(KEEPS_DROPOUT)}, where it is an error, else true",
    )  # fmt: skip
    # Logging and saving.
    log_steps: int = key(10, "steps between two lines of metrics")
    evaluation_steps: int | None = key(None, "steps between two evaluations on mixture.eval_informs")
    save_steps: int | None = key(None, "steps between two checkpoints; default: one at the end")
    save_directory: str = key("fdel-run", "where metrics, checkpoints and the model go")
    save_total_limit: int | None = key(None, "checkpoints to keep; default: all")
    resume_if_possible: bool = key(True, "continue from the last checkpoint in save_directory")
    metric_for_best_model: str | None = key(
        None, "metric of evaluation, such as eval_loss, whose best checkpoint stays"
    )
    greater_is_better: bool = key(False, "of metric_for_best_model", needs="metric_for_best_model")
    early_stopping_patience: int | None = key(
        None, "evaluations without a better metric before training ends", needs="metric_for_best_model"
    )
    use_wandb: bool = key(False, "log to Weights & Biases too")
    use_tensorboard: bool = key(False, "write TensorBoard events too")
    # Data.
    completion_only_loss: bool | None = key(None, "learn completions; default: where there are any", by=TEXT)
    assistant_only_loss: bool = key(False, "learn what the assistant says", by=TEXT)
    packing: bool | None = key(None, "several texts in a row", by=TEXT)
    packing_strategy: str = key("bfd", "how texts share rows", choices=("bfd", "bfd_split", "wrapped"), by=TEXT)
    fcm_max_ratio: float = key(
        0.0, "forgetful causal masking: the largest share of a row's tokens that attention does not see", by=("sft",)
    )
    fcm_min_ratio: float = key(0.0, "the least share; each row draws its own", by=("sft",), needs="fcm_max_ratio")
    # The losses.
    loss_type: str | tuple[str, ...] | None = key(
        None, "variant of the loss, as in TRL", by=("sft", *PAIRS[:3], "kto", "embedding")
    )
    loss_weights: tuple[float, ...] | None = key(None, "weights of several loss types; default: 1", by=("dpo",))
    beta: float | None = key(
        None, "strength of the preference, default 0.1; gkd: from forward (0) to reverse KL (1), default 0.5",
        by=(*PAIRS, "kto", "bco", "gkd"),
    )  # fmt: skip
    lambda_orpo: float | None = key(None, "another name of orpo's beta", by=("orpo",))
    label_smoothing: float = key(0.0, "share of wrong labels", by=("sft", "dpo", "cpo", "simpo"))
    z_loss: float = key(0.0, "weight of the squared log of the softmax's denominator", by=("sft",))
    router_aux_loss_coef: float = key(
        0.0,
        "weight of the load balancing of experts",
        by=tuple(t for t in TYPES if t not in (*HEADED, "embedding")),
    )
    alpha: float | None = key(
        None, "distillation: the teacher's share of the loss, default 0.9; cpo, simpo: AlphaPO's shape, default 0",
        by=("cpo", "simpo", "distillation"),
    )  # fmt: skip
    temperature: float | None = key(
        None, "of both models' distributions, default: 2, gkd: 1; embedding: of the cosines, default: 0.05",
        by=(*TEACHER, "embedding"),
    )  # fmt: skip
    hidden_state_loss_weight: float = key(0.0, "weight of the squared distance of hidden states", by=("distillation",))
    hidden_state_layers: tuple[int, ...] | None = key(
        None,
        "which: 0 enters layer 0, i leaves layer i - 1, -1 is the last, the default",
        by=("distillation",),
        needs="hidden_state_loss_weight",
    )
    attention_loss_weight: float = key(
        0.0, "weight of the squared distance of attention weights; takes 4 bytes * heads * max_length^2 for each row and "
        "layer that is matched, in both models", by=("distillation",),
    )  # fmt: skip
    attention_layers: tuple[int, ...] | None = key(
        None,
        "which, among the layers that attend; -1 is the last; default: all",
        by=("distillation",),
        needs="attention_loss_weight",
    )
    attention_normalize: bool = key(
        False,
        "divide attention weights by their sum",
        by=("distillation",),
        refuse="a softmax sums to 1 already; remove it",
    )
    lmbda: float = key(0.0, "share of the student's own samples", by=("gkd",), refuse="samples are not in this version")
    cpo_alpha: float = key(1.0, "weight of the chosen completions' likelihood", by=("cpo",))
    simpo_gamma: float = key(
        0.5, "margin of loss_type simpo", by=("cpo", "simpo"), needs="loss_type", of=("simpo", "alphapo")
    )
    f_divergence_type: str = key("reverse_kl", "divergence from the reference", by=("dpo",))
    f_alpha_divergence_coef: float = key(
        0.5, "of f_divergence_type alpha_divergence", by=("dpo",), needs="f_divergence_type", of=("alpha_divergence",)
    )
    discopop_tau: float = key(0.05, "of loss_type discopop", by=("dpo",), needs="loss_type", of=("discopop",))
    ld_alpha: float | None = key(None, "weight of the tokens past the shorter completion", by=("dpo",))
    use_weighting: bool = key(False, "weigh pairs by their probability (WPO)", by=("dpo",))
    precompute_ref_log_probs: bool = key(
        False, "compute the reference's log-probabilities once before training, not in every step", by=REFERENCE
    )
    sync_ref_model: bool = key(False, "let the reference follow the model (TR-DPO)", by=("dpo", "kto"))
    ref_model_mixup_alpha: float = key(
        0.6, "share of the model in a move of the reference", by=("dpo", "kto"), needs="sync_ref_model"
    )
    ref_model_sync_steps: int = key(
        512, "steps between two moves of the reference", by=("dpo", "kto"), needs="sync_ref_model"
    )
    desirable_weight: float = key(1.0, "weight of desirable rows", by=("kto",))
    undesirable_weight: float = key(1.0, "weight of undesirable rows", by=("kto",))
    center_rewards_coefficient: float = key(0.0, "keeps rewards around 0", by=("reward",))
    step_separator: str = key("\n", "text after each step, at whose end it is judged", by=("prm",))
    train_on_last_step_only: bool = key(False, "learn the last step's label alone; evaluation has all", by=("prm",))
    negatives: int = key(1, "hard negatives of a row, at the most", by=("embedding",))
    pooling: str = key("last", "which hidden states embed a text", choices=("last", "mean"), by=("embedding",))
    margin: float = key(0.2, "of loss_type triplet, in cosine distance", by=("embedding",))
    matryoshka_dims: tuple[int, ...] | None = key(None, "learn prefixes of these sizes as well", by=("embedding",))
    group_size: int | None = key(None, "samples of a prompt", by=("grpo",))
    kl_coef: float | None = key(None, "weight of the divergence from the reference", by=("grpo",))
