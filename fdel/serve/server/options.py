"""What a server serves and where: each option declared once, for Python, for `fdel serve` and for run files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fdel import params
from fdel.params.quantize import FORMATS
from fdel.serve.engine.settings import Settings, documented, setting


@documented
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What to serve and where."""

    host: str = setting("127.0.0.1", "address to listen on; beyond this machine it needs keys")
    port: int = setting(8000, "port to listen on; 0: a free one")
    names: Sequence[str] = setting((), "a model's name, one for each directory (default: its directory's)", "--name")
    adapters: Mapping[str, str] = setting(
        {}, "a PEFT adapter of the first model, by the name under which that answers with it", "--adapter NAME=DIR"
    )
    dtype: Any = setting(None, "cast weights to this dtype, such as float32 or bfloat16 (default: as stored)")
    mesh: str | None = setting(None, "devices to divide weights and cache over, such as tp=4 (default: one device)")
    draft: str | None = setting(None, "a smaller model of the same tokens, which guesses drafts tokens ahead, or 3",
        "--draft DIR")  # fmt: skip
    rules: params.Rules | None = setting(None, "where axes of weights lie (default: `params.SERVE`)", None)
    quantize: str | None = setting(None, "keep the layers' matrices in few bits", choices=tuple(FORMATS))
    tool_parser: str | None = setting(None, "how the models write calls of tools: a key of "
        "`serve.server.tools.FORMATS`, or none (default: by their chat template)")  # fmt: skip
    score_template: Path | None = setting(None,
        "chat template of the roles query and document, by which a classifier's pairs for /v1/score and /v1/rerank are "
        "written (default: the model's chat template named score, or as its tokenizer joins pairs)")  # fmt: skip
    key_file: Path | None = setting(None, "keys that may ask; see `fdel keys`", "--api-key-file")
    adapter_root: Path | None = setting(None,
        "directory below which admins may load adapters while the server runs (default: none)")  # fmt: skip
    audit: Path | None = setting(
        None, "append a line of JSON for every call to this file (mode 0600), without texts and secrets", "--audit-log"
    )
    insecure: bool = setting(False, "listen beyond this machine, and answer to any name, without keys")
    truncate: str | None = setting(None, "where too long prompts are cut (default: they are refused)",
        choices=("left", "right", "middle"))  # fmt: skip
    audio_seconds: float = setting(1500.0, "the longest sound, in seconds")
    audio_bytes: int = setting(25 * 2**20, "the largest file of a sound, in bytes")
    images: int = setting(8, "the most images of one chat")
    image_bytes: int = setting(10 * 2**20, "the largest file of an image, in bytes")
    image_pixels: int = setting(2**24, "the most pixels of an image")
    videos: int = setting(1, "the most videos of one chat")
    video_bytes: int = setting(50 * 2**20, "the largest file of a video, in bytes")
    video_pixels: int = setting(2**25, "the most pixels of all frames that are taken of a video")
    sounds: int = setting(4, "the most sounds of one chat; each as `audio_seconds` and `audio_bytes` say")
    video_cpu: float = setting(10.0, "the most seconds of processor time to decode one video of a chat")
    image_memory: int = setting(
        2**31,
        "the most bytes of images, videos and sounds, as models take them, of all requests; one client has half at most",
    )
    media_hosts: Sequence[str] = setting((), "a host from which files may be fetched, NAME or NAME:PORT; never from "
        "private addresses (default: they come in requests alone)", "--media-host NAME")  # fmt: skip
    grace: float = setting(30.0, "seconds for answers under way when the server is told to end")
    memory: float = setting(0.85,
        "share of a device's memory for weights and cache, where the device tells its size and pages is None",
        None)  # fmt: skip
    programs: Path | None = setting(Path.home() / ".cache" / "fdel",
        "where compiled programs are kept for the next start; in Python, None: nowhere")  # fmt: skip
    settings: Settings = Settings()
