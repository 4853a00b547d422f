"""What a recipe need not repeat: `model: {folder: PATH}` takes sizes, weights and tokenizer from a Hugging Face
folder or the hub.
"""

from __future__ import annotations

from ..core import schema
from ..core.by_path import existing
from ..core.errors import ConfigError
from ..core.schema import Located


def fill_in(tree: Located) -> None:
    """Fill in what `model.folder` says: the commit of a hub id, the sizes that the recipe leaves out, and the folder
    of its start.
    """
    model = tree.value.get("model") if isinstance(tree.value, dict) else None
    folder = model.value.get("folder") if model is not None and isinstance(model.value, dict) else None
    if model is None or folder is None or not isinstance(folder.value, str):
        return
    from ..models.hub import pin, sizes_of

    try:
        name = pin(_place(folder))
        sizes = schema.to_plain(sizes_of(name))
    except ConfigError as error:
        raise ConfigError(f"{folder.where}: model.folder: {error}") from error
    folder.value = name
    for key, value in sizes.items():
        model.value.setdefault(key, schema.located(value, folder.where))
    stages = tree.value.get("stages")
    for stage in stages.value if stages is not None and isinstance(stages.value, list) else ():
        _start_from(stage, folder)


def _place(folder: Located) -> str:
    """A folder beside the recipe, or in the current folder, by its whole path, so that a resume elsewhere means the
    same; else a hub id.
    """
    path = existing(folder.value, folder.folder)
    return folder.value if path is None else str(path.resolve())


def _start_from(stage: Located, folder: Located) -> None:
    """A stage that begins from a folder begins from this one; another is refused: sizes of one model, weights of
    another.
    """
    if not isinstance(stage.value, dict) or "kind" not in stage.value or stage.value["kind"].value != "start":
        return
    own = stage.value.setdefault("folder", Located(folder.value, folder.where))
    if isinstance(own.value, str) and _place(own) == folder.value:
        own.value = folder.value
    if own.value != folder.value:
        name = stage.value["name"].value if "name" in stage.value else stage.value["kind"].value
        raise ConfigError(
            f"{own.where}: stages.{name}.folder = {own.value} is another than model.folder = {folder.value}; leave "
            "one of them out"
        )
