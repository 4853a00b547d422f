"""Models by name: a path, or a pinned hub id; offline first. And the way back: an exported folder uploaded with its
card and proof.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..core.files import read_json, storage_errors, write_atomic
from .config import ModelConfig
from .families import read_config

README = "README.md"
# what a card says of the run, and the user's notes, lie between these
_OURS, _PROOF = "Trained with Terrella.", "## Proof of export"
_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_ID = re.compile(rf"(?P<repo>{_NAME.pattern})@(?P<revision>[0-9a-f]{{40}})")
ANSWER_S = 20.0  # for the hub to answer


def resolve(model: str | Path) -> Path:
    """The folder of a model: a path as it is, or `owner/name@commit` from the local cache, else from the hub.

    The commit must be a full hash: a branch or a tag can change under a run.
    """
    path = Path(model)
    if path.exists():
        return path
    match = _ID.fullmatch(str(model))
    if match is None:
        raise ConfigError(f"{model}: neither a folder nor a pinned hub id (owner/name@40-digit commit)")
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
    return Path(_fetch(snapshot_download, match, allow_patterns=patterns))


def _fetch(download: Callable[..., str], named: re.Match[str], **wanted: Any) -> str:
    """What of a pinned hub id is in the local cache, else from the hub."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted |= {"repo_id": named["repo"], "revision": named["revision"]}
    try:
        return download(**wanted, local_files_only=True)
    except LocalEntryNotFoundError:
        try:
            return download(**wanted, etag_timeout=ANSWER_S)
        except Exception as error:
            raise ConfigError(f"{named[0]}: not in the local cache, and the hub cannot be reached ({error})") from error


def pin(model: str) -> str:
    """A model's name that no push to the hub can change: `owner/name` gets the commit it has now; a folder and a
    pinned id stay.
    """
    if Path(model).exists() or _ID.fullmatch(model):
        return model
    if not _NAME.fullmatch(model):
        raise ConfigError(f"{model}: neither a folder nor a hub id (owner/name, or owner/name@40-digit commit)")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return f"{model}@{HfApi().model_info(model, timeout=ANSWER_S).sha}"
    except RepositoryNotFoundError as error:
        raise ConfigError(f"{model}: no such folder, and the hub has no such model, or not without a token") from error
    except Exception as error:
        hint = "name a folder, or the commit too: owner/name@40-digit commit"
        raise ConfigError(
            f"{model}: no such folder, and the hub cannot be asked for its commit ({error}); {hint}"
        ) from error


def sizes_of(model: str) -> ModelConfig:
    """The sizes of a folder or a pinned hub id, of which no more than config.json is fetched."""
    match = None if Path(model).exists() else _ID.fullmatch(model)
    if match is None:
        return read_config(resolve(model))
    from huggingface_hub import hf_hub_download

    return read_config(_fetch(hf_hub_download, match, filename="config.json"))


def model_card(folder: Path, repo: str, base: str | None = None, notes: str = "") -> str:
    """README.md of an exported folder: what it is, and what was proven of it. `base` is a folder, or a hub id with
    or without a commit.
    """
    from .folder import PROOF

    config, proof = read_json(folder / "config.json"), read_json(folder / PROOF)
    hub = (base or "").partition("@")[0]  # the hub links to the model of this name; of a local folder it knows nothing
    linked = [f"base_model: {hub}"] if base and _NAME.fullmatch(hub) and not Path(base).exists() else []
    head = ["---", "library_name: transformers", "pipeline_tag: text-generation", *linked, "---"]
    body = [
        f"# {repo.split('/')[-1]}",
        "",
        _OURS,
        *(["", notes] if notes else []),
        "",
        _PROOF,
        "",
        f"- {len(proof['tensors'])} tensors; the xxh3-128 of each is in `export_proof.json`.",
        "- On fixed prompts the largest difference between the trainer's logits and transformers' is "
        f"{proof['max_logit_difference']:.2e}"
        f" (allowed {proof['tolerance']:.2e}).",
        f"- Architecture: {config['architectures'][0]}, {config['num_hidden_layers']} layers x {config['hidden_size']},"
        f" vocabulary {config['vocab_size']}.",
    ]
    return "\n".join([*head, "", *body]) + "\n"


def card_to_push(folder: Path, repo: str, base: str | None = None, notes: str = "") -> str:
    """The card of a folder that goes to the hub: what its own card says of the run stays. A README.md of another shape
    is the user's, and goes up as it is."""
    if not (folder / README).exists():
        return model_card(folder, repo, base, notes)
    with storage_errors(folder / README):
        text = (folder / README).read_text(encoding="utf-8")
    ours = re.search(rf"^{re.escape(_OURS)}\n(.*)^{re.escape(_PROOF)}\n", text, re.M | re.S)
    if ours is None:
        if base or notes:
            raise ConfigError(
                f"{folder / README}: is not a card that terrella wrote; write base and notes into it, or remove it"
            )
        return text
    linked = re.search(r"^base_model: (\S+)$", text, re.M)
    about = ours[1].strip("\n")
    return model_card(
        folder, repo, base or (linked and linked[1]), about if notes in about else f"{notes}\n\n{about}".strip()
    )


def push(folder: str | Path, repo: str, *, base: str | None = None, notes: str = "", private: bool = True) -> str:
    """Upload a proven export with its card; returns the commit's address."""
    from huggingface_hub import HfApi

    from .folder import verify_export

    folder = Path(folder)
    verify_export(folder)
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"{folder}: holds adapters only; upload the merged model (terrella convert to-hf --adapters merge)"
        )
    write_atomic(folder / README, card_to_push(folder, repo, base, notes))
    api = HfApi()
    api.create_repo(repo, private=private, exist_ok=True)
    return str(
        api.upload_folder(
            repo_id=repo, folder_path=str(folder), commit_message="Upload with proof of export"
        ).commit_url
    )
