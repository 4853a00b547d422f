"""dataset.json, the card of a folder of shards: which shards belong to it and the checksum of each.

What the card lists must be there. An index that was lost is made again from the tar, if the card proves that the tar is
whole. README.md beside it says to Hugging Face's `datasets` what the folder holds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import xxhash

from .. import codecs
from ..errors import ShardError
from ..schema import KINDS
from . import store
from .index import ShardIndex, index_path, load_index, read_header, scan_index

CARD = "dataset.json"
README = "README.md"
QUARANTINE = "quarantine.json"
_KEYS = {"terrella_dataset", "kind", "samples", "bytes", "fields", "schema", "shards"}
KEEP = "restore it, or delete dataset.json to take the folder as it is"


@dataclass(frozen=True)
class Folder:
    """What is known of a folder of shards before any of them is opened: each of its small files is read once."""

    path: str
    names: frozenset[str]  # none where the store cannot list
    stated: dict[str, dict[str, Any]]  # what the card says of each shard
    aside: dict[str, frozenset[str]]  # keys in quarantine, by shard

    @classmethod
    def at(cls, path: str) -> Folder:
        return cls(path, frozenset(store.list_names(path)), read_card(path), read_quarantine(path))

    def has_index(self, tar: str) -> bool:
        path = index_path(tar)
        return store.base_name(path) in self.names if self.names else store.exists(path)

    def missing(self) -> list[str]:
        """Names of shards that the card lists and the folder does not hold."""
        return sorted(set(self.stated) - self.names) if self.names else []


def folder_of(path: str) -> str:
    """The folder of a shard."""
    return path[: -len(store.base_name(path))] or "."


def read_card(folder: str) -> dict[str, dict[str, Any]]:
    """What the card says of each shard, by its name (and its kind under "kind"); {} without a card."""
    path = store.join(folder, CARD)
    return _parse(store.read_bytes(path), path) if store.exists(path) else {}


def _parse(raw: bytes, path: str) -> dict[str, dict[str, Any]]:
    try:
        card = json.loads(raw)
        kind = card["kind"]
        stated = {
            entry["name"]: {"kind": kind, **{key: entry[key] for key in ("samples", "bytes", "xxh3")}}
            for entry in card["shards"]
        }
        sealed = card.get("card_xxh3")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ShardError(f"not the card of a dataset ({error}); {KEEP}", shard=path) from error
    # the first releases wrote no seal
    if set(card) - {"card_xxh3"} != _KEYS or (sealed is not None and sealed != _seal(card)):
        raise ShardError(f"the card is not as it was written; {KEEP}", shard=path)
    return stated


def read_quarantine(folder: str) -> dict[str, frozenset[str]]:
    """The keys that quarantine.json sets aside, by the name of their shard."""
    path = store.join(folder, QUARANTINE)
    if not store.exists(path):
        return {}
    found: dict[str, set[str]] = {}
    try:
        for entry in json.loads(store.read_bytes(path))["samples"]:
            found.setdefault(entry["shard"], set()).add(str(entry["sample"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ShardError(
            f"not a list of samples set aside ({error}); delete it and run `terrella shards verify`", shard=path
        ) from error
    return {name: frozenset(keys) for name, keys in found.items()}


def open_index(path: str, data: store.Bytes, folder: Folder) -> ShardIndex:
    """The index of a shard, agreeing with the card; without an index file it is made from the tar.

    Shards of other writers have neither index nor card, and so no checksums. Where the card or a neighbour's index
    shows that there were checksums, they are not silently done without: the card must prove the tar, or the shard is
    refused.
    """
    stated = folder.stated.get(store.base_name(path))
    if folder.has_index(path):
        index = load_index(path)
        if stated and (len(index), index.tar_bytes, index.tar_xxh3) != (
            stated["samples"],
            stated["bytes"],
            stated["xxh3"],
        ):
            raise ShardError(f"its index describes another tar than {CARD} does; {KEEP}", shard=path)
        return index
    if stated is None and any(other.endswith(".index") for other in folder.names):
        raise ShardError(
            "it has no index though its neighbours have, so nothing says whether it is whole; restore it", shard=path
        )
    whole = store.view(path, ahead=store.BLOCK) if isinstance(data, store.Ranges) else data  # all of it is read
    if stated is None:
        return scan_index(path, whole)
    if len(whole) != stated["bytes"] or store.checksum(whole) != stated["xxh3"]:
        raise ShardError(
            f"its index is missing, and the tar is not the one of {CARD}; restore the index or the shard", shard=path
        )
    return scan_index(path, whole, sums=True, kind=stated["kind"])


def write_card(folder: str) -> dict[str, Any]:
    """Describe the folder's shards in dataset.json: what is there, how much, and the checksum of each."""
    shards, fields, kinds = [], {}, set()
    for name in store.list_names(folder):
        path = store.join(folder, name)
        if name.endswith(".tar") and not name.startswith(".") and store.exists(index_path(path)):
            head = read_header(path)
            kinds.add(head["kind"])
            fields |= dict.fromkeys(head["fields"])
            shards.append(
                {"name": name, "samples": head["samples"], "bytes": head["tar_bytes"], "xxh3": head["tar_xxh3"]}
            )
    kind = kinds.pop() if len(kinds) == 1 else None
    card = {
        "terrella_dataset": 1,
        "kind": kind,
        "samples": sum(s["samples"] for s in shards),
        "bytes": sum(s["bytes"] for s in shards),
        "fields": list(fields),
        "schema": KINDS[kind].describe() if kind in KINDS else None,
        "shards": shards,
    }
    store.write_bytes(store.join(folder, CARD), codecs.encode_json({**card, "card_xxh3": _seal(card)}) + b"\n")
    _write_readme(folder, list(fields), kind)
    return card


README_BODY = """
`datasets.load_dataset(FOLDER)` reads these shards with any release from 4.0 on. A column NAME.json holds the text of
the member's value as Python writes it, because releases before 4.7 have no type for JSON (and cannot stream such
columns): `ast.literal_eval(row["NAME.json"])` is the value, but for a member that is a JSON string, which is that
string itself. From 4.7 on you get the values themselves, streaming or not, with

    from datasets import Features, Json, List, Value, load_dataset
    columns = {COLUMNS}
    rows = load_dataset(FOLDER, split="train", features=Features(columns))
"""


def _write_readme(folder: str, fields: list[str], kind: str | None) -> None:
    """The front matter by which `datasets.load_dataset(folder)` reads the shards; a README of the user's stays.

    Without it `datasets` would take dataset.json for the data, and guess columns from the first five samples, losing
    keys that only later ones have. Where a member is neither JSON nor one row of ids (pictures), it may guess. JSON is
    text: no type that keeps unlike objects is known to every release, and a README with an unknown one is refused.
    """
    path = store.join(folder, README)
    begin = "---\n# written by terrella\nconfigs:\n- config_name: default\n  data_files: '*.tar'\n"
    if store.exists(path) and not store.read_bytes(path).startswith(begin.encode()):
        return

    def column(field: str) -> tuple[str, str] | None:
        """A field's type in the front matter, and in Python where JSON has one."""
        member = KINDS[kind].member(field) if kind in KINDS else None
        if field.endswith(".json"):
            return "dtype: string", "Json()"
        return ("list: int64", 'List(Value("int64"))') if member is not None and member.ndim == 1 else None

    text = ("dtype: string", 'Value("string")')
    columns = {field: column(field) for field in fields} | dict.fromkeys(("__key__", "__url__"), text)
    known = {field: found for field, found in columns.items() if found is not None}
    info = body = ""
    if len(known) == len(columns):
        features = "".join(f"  - name: {json.dumps(field)}\n    {front}\n" for field, (front, _) in known.items())
        info = f"dataset_info:\n  features:\n{features}"
        if any(field.endswith(".json") for field in fields):
            listed = ", ".join(f"{json.dumps(field)}: {python}" for field, (_, python) in known.items())
            body = README_BODY.replace("COLUMNS", listed)
    store.write_bytes(path, f"{begin}{info}---\n{body}".encode())


def _seal(card: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(
        json.dumps({k: v for k, v in card.items() if k != "card_xxh3"}, sort_keys=True).encode()
    )
