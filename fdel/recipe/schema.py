"""Every key of a run file, declared once: its type, its default, what it means, and what of it is not honoured.

Parsing, error messages, YAML and JSON, `print` and the table of all keys are readings of these dataclasses.
A key whose default is None has a default that depends on others, which its text then says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fdel.params.quantize import FORMATS as IN_MEMORY
from fdel.params.quantize import NAMES
from fdel.recipe.parse import key
from fdel.serve.server.evaluate import Options
from fdel.serve.server.options import ServerOptions, Settings

DTYPES = {
    "fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16",
    "float16": "float16",
}  # fmt: skip
# quantization_method -> format of `params.quantize`; those of CACHED are formats of a cache too
FORMATS = {name: name for name in IN_MEMORY} | NAMES
CACHED = ("8bit", "int8", "fp8")
TEXT_TASKS = ("causal-language-model", "causal-lm", "auto-bind")
OTHER_TASKS = (
    "vision-language-model", "image-text-to-text", "sequence-to-sequence", "speech-sequence-to-sequence",
    "image-classification",
)  # fmt: skip
CHOSEN = "fdel chooses implementations by platform and shape (`ops.dispatch`); remove it"
ALWAYS = "this version has no other way; remove it"
SERVING = "read by the actions serve and eval alone"
INSIDE = "texts become tokens inside of the server; remove it"


def setting(of: type, name: str, **more: Any) -> Any:
    """Declare the key of a setting of the server, its engine or evaluation, which may have another name in run files."""
    f = of.__dataclass_fields__[name]  # type: ignore[attr-defined]
    least = f.metadata["least"] or None  # 0 is the default, by another name
    return key(**{"default": f.default, "doc": f.metadata["doc"], "setting": name, "least": least} | more)


@dataclass(frozen=True)
class Extra:
    """More arguments for loading a model."""

    revision: str | None = key(None, "branch, tag or commit on the Hub")
    trust_remote_code: bool = key(False, "run code of a repository", refuse="fdel never runs remote code; remove it")


@dataclass(frozen=True)
class Model:
    """A model in Hugging Face layout."""

    name_or_path: str | None = key(None,
        "directory, or Hub id; one with a config.json alone starts from random weights")  # fmt: skip
    config: Mapping[str, Any] | None = key(None,
        "config.json itself, in place of name_or_path: start from random weights")  # fmt: skip
    tokenizer: str | None = key(None, "directory or Hub id of the tokenizer; default: the model's")
    task: str | None = key(None, "kind of model", choices=TEXT_TASKS + OTHER_TASKS, honours=TEXT_TASKS,
        refuse="this version has language models only (causal-language-model)")  # fmt: skip
    extra_kwargs: Extra = key(Extra(), "more arguments for loading")


@dataclass(frozen=True)
class Loader:
    """Precision, and how weights are read."""

    dtype: str | None = key(None, "dtype of the computation; default: the parameters'", choices=tuple(DTYPES))
    param_dtype: str | None = key(None, "dtype of the parameters; default: the checkpoint's", choices=tuple(DTYPES))
    precision: str | None = key(None, "of matrix products, see jax.default_matmul_precision",
        choices=("default", "high", "highest"))  # fmt: skip
    kernels: Mapping[str, str] | None = key(
        None, "implementations of operations, as {attend: flash}; see fdel.ops.explain"
    )
    verbose: bool = key(False, "say what was loaded")
    from_torch: bool | None = key(None, "read a Hugging Face checkpoint, safetensors or .bin", honours=(True,),
        refuse="fdel reads Hugging Face checkpoints and no other format; remove it")  # fmt: skip
    trust_remote_code: bool = key(False, "run code of a repository", refuse="fdel never runs remote code; remove it")


@dataclass(frozen=True)
class Sharding:
    """The device mesh and what is divided over it."""

    axis_dims: tuple[int, ...] = key((1, -1, 1, 1, 1), "sizes of the axes, one of them may be -1; all 1: one device")
    axis_names: tuple[str, ...] = key(("dp", "fsdp", "ep", "tp", "sp"), "names of the axes, in the order of axis_dims")
    dcn_axis_dims: tuple[int, ...] | None = key(None, "slices or hosts along each axis; axis_dims is one's mesh")
    rules: Mapping[str, Any] | None = key(None, "mesh axis of an axis of weights, as in {kv_heads: null}")
    auto_shard_model: bool = key(True, "divide parameters by axis names",
        refuse="parameters follow axis_dims; for whole ones use dp alone")  # fmt: skip
    use_ring_of_experts: bool = key(False, "pass tokens round a ring of experts along ep")
    fsdp_is_ep_bound: bool = key(False, "fold fsdp into the experts' axis", refuse=ALWAYS)
    sp_is_ep_bound: bool = key(False, "fold sp into the experts' axis", refuse=ALWAYS)


@dataclass(frozen=True)
class Distributed:
    """The processes of a run; by default those of torchrun, Slurm, OpenMPI, Kubernetes or a TPU pod."""

    coordinator: str | None = key(None, "host:port of process 0; auto: as jax finds it; default: the launcher's")
    processes: int | None = key(None, "how many there are; 1: this one alone, whatever a launcher says")
    process_id: int | None = key(None, "the number of this one, from 0, as --set distributed.process_id=1")


@dataclass(frozen=True)
class Format:
    """How numbers are quantized."""

    quantization_method: str | None = key(
        None,
        "of the stored numbers; a8bit, a8q, w8a8, w4a8, a4q and w4a4 (8 or 4 bits) round activations too, row by row",
        choices=tuple(FORMATS),
    )
    group_size: int | None = key(None,
        "numbers that share a scale; default: 64 for four bits (mxfp4: 32), else all inputs of an output",
        needs="quantization_method", positive=True)  # fmt: skip


@dataclass(frozen=True)
class Quantization:
    """Weights of few bits. In training they are frozen, and LoRA adapters are trained on them (QLoRA)."""

    platform: str | None = key(None, "implementation", choices=("triton", "pallas", "jax"), honours=("jax",),
        refuse=CHOSEN)  # fmt: skip
    apply_quantization: bool = key(True, "false leaves the model as it is, whatever `model` says")
    kv_cache: Format = key(Format(), f"of keys and values; {SERVING}")
    model: Format = key(Format(), "of the matrices in the language model's layers; towers stay whole")
    straight_through: bool = key(False, "train the weights themselves for `model`: rounded in each step, saved whole")


@dataclass(frozen=True)
class BaseConfig:
    """Changes of the model's config.json."""

    values: Mapping[str, Any] | None = key(None, "keys of config.json and their values; an unknown one is an error")
    operation_configs: Mapping[str, Any] | None = key(None, "block sizes of kernels", refuse=CHOSEN)


@dataclass(frozen=True)
class Esurge:
    """The inference engine."""

    max_model_len: int | None = setting(Settings, "max_length")
    max_num_seqs: int = setting(Settings, "rows", default=256)
    hbm_utilization: float = setting(ServerOptions, "memory")
    page_size: int = key(64, "tokens of a page of keys and values", refuse="pages have 64 tokens; remove it")
    use_aot_forward: bool = key(True, "compile before the first request", refuse=ALWAYS)
    enable_prefix_caching: bool = key(True, "reuse the pages of equal prefixes, where the model allows it")
    compile_runner: bool = key(True, "compile the step", refuse=ALWAYS)
    overlap_execution: bool = setting(Settings, "overlap")
    silent_mode: bool = key(False, "no log")
    auto_truncate_prompt: bool = key(False, "cut prompts that do not fit; false refuses them")
    auto_cap_new_tokens: bool = key(True, "generate no more than fits", refuse=ALWAYS)
    strict_context: bool = key(False, "refuse prompts that do not fit; not with auto_truncate_prompt")
    truncate_mode: str | None = key(None, "where auto_truncate_prompt cuts; default: left",
        choices=("left", "right", "middle"), needs="auto_truncate_prompt")  # fmt: skip
    draft_model: str | None = setting(ServerOptions, "draft")
    draft_tokens: int | None = key(None, "tokens guessed ahead; default: 3 with a draft_model, whose guesses they "
        "are, else none; without one, what was said before is the guess", setting="drafts", least=1)  # fmt: skip
    tokenizer_endpoint: str | None = key(None, "address of a tokenizer process", refuse=INSIDE)
    detokenizer_endpoint: str | None = key(None, "address of a detokenizer process", refuse=INSIDE)


@dataclass(frozen=True)
class Eval:
    """Evaluation with lm_eval's benchmarks."""

    max_new_tokens: int | None = setting(Options, "max_new_tokens", least=1)
    temperature: float | None = setting(Options, "temperature", least=0, most=100)
    top_p: float | None = setting(Options, "top_p", least=1e-9, most=1)
    batch_size: int = setting(Options, "batch", least=1, doc="sequences at a time, at most esurge.max_num_seqs of them "
        "when they are generated")  # fmt: skip
    use_tqdm: bool = setting(Options, "progress")
    limit: int | float | None = setting(Options, "limit", positive=True)
    cache_requests: bool = setting(Options, "cache_requests")
    apply_chat_template: bool = setting(Options, "apply_chat_template")
    system_instruction: str | None = setting(Options, "system_instruction")


@dataclass(frozen=True)
class Inform:
    """One data set of a mixture."""

    type: str = key("json", "json, jsonl, parquet, arrow, csv, text, a directory or a Hub id; any may have images")
    data_files: str | tuple[str, ...] | None = key(None, "files, directories and globs")
    name: str | None = key(None, "by which mixture_weights names it")
    split: str | None = key(None, "split of a data set directory; default: train")
    dataset_split_name: str | None = key(None, "another name of split")
    content_field: str | None = key(None, "column of the text, or of the prompt; default: by the columns' own names")
    additional_fields: tuple[str, ...] = key((), "more columns that the trainer reads")
    num_rows: int | None = key(None, "rows at the most; default: all")
    format_fields: Mapping[str, str] | None = key(None, "columns to rename, old: new")
    weight: float | None = key(None, "share in the mixture; default: by length")
    image_field: str | None = key(None, "column of an image", refuse="it is called images; rename it by format_fields")
    text_field: str | None = key(
        None, "column of an image's text", refuse="it is called text; rename it by format_fields"
    )


@dataclass(frozen=True)
class Tokenization:
    """How text becomes rows of tokens."""

    max_length: int | None = key(None, "tokens of a row, as trainer.max_length")
    truncation: bool | None = key(None,
        "cut longer texts, or leave them out; default: cut, but leave out reward's pairs")  # fmt: skip
    padding: str | bool | None = key(None, "fill shorter rows", honours=("max_length", True),
        refuse="rows have one length; use max_length")  # fmt: skip


@dataclass(frozen=True)
class Save:
    """Where tokenised data is kept, so that the next run need not tokenise."""

    path: str | None = key(None, "directory")
    format: str | None = key(None, "of the files", refuse="they have a format of their own; remove it")


@dataclass(frozen=True)
class Mixture:
    """The training data."""

    informs: tuple[Inform, ...] = key((), "the data sets")
    eval_informs: tuple[Inform, ...] = key((), "data sets to evaluate on during training")
    batch_size: int | None = key(None, "rows of a step, as trainer.total_batch_size")
    shuffle_buffer_size: int | None = key(None, "examples shuffled or packed together in a stream; 0: no shuffling")
    seed: int = key(42, "of the shuffling")
    pack_tokens: bool | None = key(None, "several texts in a row, as trainer.packing")
    pack_seq_length: int | None = key(None, "tokens of a packed row; default: trainer.max_length")
    pack_eos_token_id: int | None = key(None, "id that ends a text; default: the tokenizer's")
    pack_shuffle: bool = key(True, "shuffle before packing")
    pack_shuffle_buffer_factor: int | None = key(None, "packed rows held",
        refuse="use shuffle_buffer_size, in examples")  # fmt: skip
    pack_on_the_fly: bool = key(False, "a stream: tokenise and pack while training, and keep nothing")
    block_mixture: bool | None = key(None, "each mixture_block_size examples have exactly the weights, in random order")
    mixture_block_size: int | None = key(None, "examples of a block; default with block_mixture: 2048")
    stop_strategy: str = key("first_exhausted", "when an epoch of several data sets ends",
        choices=("first_exhausted", "longest"))  # fmt: skip
    mixture_weights: Mapping[str, float] | None = key(None, "share of each data set by its name; default: by length")
    use_audio_in_video: bool = key(False, "hear what videos play, between their frames; silent ones are seen alone")
    prefetch_workers: int = key(2, "threads that read and tokenise")
    prefetch_buffer_size: int = key(4, "batches that they are ahead")
    cache_remote_files: bool = key(True, "keep downloaded files", refuse="they are always kept; remove it")
    tokenization: Tokenization = key(Tokenization(), "how text becomes tokens")
    save: Save = key(Save(), "keep the tokenised data")


@dataclass(frozen=True)
class EvalAction:
    """Run lm_eval's benchmarks."""

    tasks: tuple[str, ...] = setting(Options, "tasks", default=())
    include_path: str | None = setting(Options, "include_path")
    engine: str = key("esurge", "what generates", choices=("esurge",))
    num_fewshot: int | None = setting(Options, "num_fewshot", least=0)
    output_path: str | None = key(None, "new file for the results, as JSON")
    print_results: bool = key(True, "show the results")


@dataclass(frozen=True)
class ServeAction:
    """Start the HTTP server."""

    host: str = setting(ServerOptions, "host")
    port: int = setting(ServerOptions, "port", default=11556)
    log_level: str = key("info", "how much is logged", choices=("debug", "info", "warning", "error"))
    enable_function_calling: bool = key(True, "parse tool calls")
    tool_parser_name: str | None = key(None, "format of tool calls; default: by the chat template",
        needs="enable_function_calling")  # fmt: skip
    oai_like_processor: bool = key(True, "answers as OpenAI's", refuse=ALWAYS)
    require_api_key: bool | None = key(None, "refuse requests without a key; default: if there is an api_key_file")
    api_key_file: str | None = key(None, "keys that may ask; see `fdel keys`")


@dataclass(frozen=True)
class FileAction:
    """Write the recipe to a file."""

    path: str | None = key(None, "the file; required")


ACTIONS: dict[str, type | None] = {
    "validate": None, "train": None, "eval": EvalAction, "serve": ServeAction, "print": None, "dump_config": None,
    "to_json": FileAction, "to_yaml": FileAction,
}  # fmt: skip
ALIASES = {"server": "serve", "show": "print", "config": "dump_config", "save_json": "to_json", "save_yaml": "to_yaml"}


@dataclass(frozen=True)
class Action:
    """One thing to do: its name, and its settings where it has any."""

    name: str
    settings: Any = None
