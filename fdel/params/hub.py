"""Fetch checkpoints from the Hugging Face Hub and upload them; cache, tokens and offline mode are its library's."""

from pathlib import Path
from types import ModuleType

TEXT = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")  # configuration, templates and tokenizers
IGNORE = ("*/*", "consolidated*")  # other formats of the same weights


def _hub(what: str) -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as e:
        raise ImportError(f"{what} needs huggingface_hub: pip install 'fdel[hub]'") from e
    return huggingface_hub


def resolve(path_or_id: str | Path, *, revision: str | None = None) -> Path:
    """Give the local directory of a checkpoint: an existing one or a GGUF file as it is, else a Hub repository's snapshot.

    Downloads safetensors (.bin files only if there are none), configuration and tokenizer files, and nothing that the
    cache has. `revision` is a branch, tag or commit. What is neither a directory nor in the cache nor within reach is a
    FileNotFoundError; without the `hub` extra an ImportError. The Hub's own errors (access, names) pass.
    """
    path, name = Path(path_or_id).expanduser(), str(path_or_id)
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        if revision is not None:
            raise ValueError(f"{name} is a local directory, which has no revision {revision!r}; leave revision out")
        return path
    if path.is_absolute() or path.exists() or name.startswith((".", "~")) or name.count("/") > 1 or "\\" in name:
        raise FileNotFoundError(f"{name} is not a directory; expected one, or a Hub id such as organisation/name")
    hub = _hub(f"{name} is not a local directory; to fetch it from the Hub")

    def fetch(*patterns: str) -> Path:
        allow = [*patterns, *TEXT]
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=allow, ignore_patterns=[*IGNORE]))

    try:
        snapshot = fetch("*.safetensors")
        return snapshot if any(snapshot.glob("*.safetensors")) else fetch("*.bin")
    except hub.errors.LocalEntryNotFoundError as e:
        raise FileNotFoundError(
            f"{name} is neither a local directory nor complete in the Hub cache, and the Hub is out of reach "
            f"({' '.join(str(e).split())[:200]})"
        ) from e


def push(
    directory: str | Path, repo_id: str, *, private: bool = True, revision: str | None = None,
    message: str = "Upload a checkpoint with fdel",
) -> str:  # fmt: skip
    """Upload a directory to a Hub repository, which is created (private by default) if need be.

    Returns the URL of the commit. An empty or absent directory is a FileNotFoundError; without the `hub` extra an
    ImportError.
    """
    directory = Path(directory)
    if not directory.is_dir() or not any(directory.iterdir()):
        raise FileNotFoundError(f"{directory} is not a directory with files; save a checkpoint there first")
    hub = _hub("uploading")
    repo = hub.create_repo(repo_id, private=private, exist_ok=True)
    commit = hub.upload_folder(
        repo_id=repo.repo_id, folder_path=directory, revision=revision, commit_message=message,
        ignore_patterns=[".partial-*"],
    )  # fmt: skip
    return str(commit.commit_url)
