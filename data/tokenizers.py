"""Tokenizers: characters, given pieces, bytes or learnt pieces for tiny worlds, Hugging Face folders for everything
else.

The small ones refuse what they cannot spell (there is no unknown token) and never read a special token out of text.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..core.by_path import ByPath
from ..core.by_path import describe_error as by_path_error
from ..core.errors import ConfigError, describe_error
from ..core.files import read_json, write_json

SPECIALS = ("<pad>", "<bos>", "<eos>")
MARK = "terrella_tokenizer.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer"  # the folder of a tokenizer in that of the stage which made it


class Tokenizer(Protocol):
    """What the rest of the project asks of a tokenizer."""

    vocab_size: int
    pad_id: int
    eos_id: int

    @property
    def bos_id(self) -> int | None: ...

    @property
    # what ends an answer: the end of text, and what generation_config.json lists
    def stop_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int] | tuple[int, ...] | np.ndarray, *, keep_special: bool = False) -> str: ...

    def save(self, folder: str | Path) -> None: ...


class _Small:
    """The special tokens of our own tokenizers have the first ids."""

    pad_id: int = 0
    bos_id: int | None = 1
    eos_id: int = 2
    stop_ids: tuple[int, ...] = (2,)


class CharTokenizer(_Small):
    """One id per character of a fixed alphabet, after the three special tokens."""

    def __init__(self, alphabet: str) -> None:
        if len(set(alphabet)) != len(alphabet):
            raise ValueError(f"the alphabet repeats a character: {alphabet!r}")
        if not alphabet:
            raise ValueError("the alphabet is empty")
        self.alphabet = alphabet
        self.vocab_size = len(SPECIALS) + len(alphabet)
        codes = np.array([ord(c) for c in alphabet], dtype=np.int64)
        self._table = np.full(int(codes.max()) + 1, -1, dtype=np.int64)
        self._table[codes] = np.arange(len(SPECIALS), self.vocab_size)
        self._pieces = [*SPECIALS, *alphabet]

    def encode_array(self, text: str) -> np.ndarray:
        """Ids of a text as int64; several equally long texts may be joined, encoded at once and reshaped."""
        codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        inside = codes < len(self._table)
        ids = self._table[np.where(inside, codes, 0)]
        bad = ~inside | (ids < 0)
        if bad.any():
            at = int(np.argmax(bad))
            raise ValueError(
                f"character {text[at]!r} at position {at} is not in the tokenizer's alphabet {self.alphabet!r}"
            )
        return ids

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def decode(self, ids: list[int] | tuple[int, ...] | np.ndarray, *, keep_special: bool = False) -> str:
        return _joined(self._pieces, ids, keep_special)

    def save(self, folder: str | Path) -> None:
        """Write a Hugging Face tokenizer folder with the same ids."""
        _save_pieces(folder, self._pieces, r"[\s\S]", {"kind": "char", "alphabet": self.alphabet})


class ByteTokenizer(_Small):
    """One id per byte of UTF-8, after the three special tokens: 259 ids, any text."""

    vocab_size = 256 + len(SPECIALS)

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64) + len(SPECIALS)

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def decode(self, ids: list[int] | tuple[int, ...] | np.ndarray, *, keep_special: bool = False) -> str:
        parts = bytearray()
        for i in _in_vocabulary(ids, self.vocab_size):
            if i >= len(SPECIALS):
                parts.append(i - len(SPECIALS))
            elif keep_special:
                parts += SPECIALS[i].encode()
        return parts.decode("utf-8", errors="replace")

    def save(self, folder: str | Path) -> None:
        """Write a Hugging Face tokenizer folder with the same ids."""
        from tokenizers import Tokenizer as Fast
        from tokenizers import decoders, models, pre_tokenizers

        vocabulary = {piece: i for i, piece in enumerate([*SPECIALS, *_byte_level_alphabet()])}
        fast = Fast(models.BPE(vocab=vocabulary, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
        _save_folder(folder, fast, {"kind": "byte"})


def _longest(pieces: Iterable[str]) -> str:
    """A pattern that matches the longest piece: by shared beginnings, which is twice as fast as one piece after the
    other.
    """
    by_first: dict[str, list[str]] = {}
    for piece in pieces:
        by_first.setdefault(piece[:1], []).append(piece[1:])
    ends = by_first.pop("", None) is not None
    branches = [re.escape(first) + _longest(rests) for first, rests in sorted(by_first.items())]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if ends else "")


class PieceTokenizer(_Small):
    """Given pieces (tags, words) and single characters, the longest piece first, after three special tokens: for
    agents from scratch.
    """

    def __init__(self, pieces: list[str]) -> None:
        if len(set(pieces)) != len(pieces) or not all(pieces):
            raise ValueError(f"the pieces repeat, or one is empty: {pieces!r}")
        self.pieces = pieces
        self._pieces = [*SPECIALS, *pieces]
        self.vocab_size = len(self._pieces)
        self._ids = {piece: i for i, piece in enumerate(pieces, len(SPECIALS))}
        self._find = re.compile(_longest(pieces))

    def encode(self, text: str) -> list[int]:
        ids, at = [], 0
        for found in self._find.finditer(text):
            if found.start() != at:
                break
            ids.append(self._ids[found[0]])
            at = found.end()
        if at != len(text):
            raise ValueError(f"character {text[at]!r} at position {at} is not among the tokenizer's pieces")
        return ids

    def decode(self, ids: list[int] | tuple[int, ...] | np.ndarray, *, keep_special: bool = False) -> str:
        return _joined(self._pieces, ids, keep_special)

    def save(self, folder: str | Path) -> None:
        """Write a Hugging Face tokenizer folder with the same ids."""
        pattern = "|".join(re.escape(piece) for piece in sorted(self.pieces, key=lambda p: (-len(p), p)))
        _save_pieces(folder, self._pieces, pattern, {"kind": "pieces", "pieces": self.pieces})


class BPETokenizer(_Small):
    """Byte-pair encoding learnt from a few texts, for small models of structured text: any text, digits alone unless
    in a name.
    """

    def __init__(self, fast: Any) -> None:
        self.fast = fast
        self.vocab_size = fast.get_vocab_size()

    @classmethod
    def train(cls, texts: list[str], vocab_size: int, names: str = "") -> BPETokenizer:
        """At most `vocab_size` pieces; merges may cross words, so that a recurring template becomes one piece.

        No merge crosses the border of what the expression `names` finds (digits of a name included), so that a name is
        spelt alike wherever it stands and can be copied from there.
        """
        from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as Fast

        if vocab_size < len(SPECIALS) + 256:
            raise ValueError(
                f"vocab_size: {vocab_size} is below {len(SPECIALS) + 256}, the bytes and the special tokens"
            )
        fast = Fast(models.BPE())
        split = pre_tokenizers.Split(Regex(rf"{names}|\d|\n" if names else r"\d|\n"), "isolated")
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])  # pyright: ignore[reportAttributeAccessIssue]
        fast.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
        )
        fast.train_from_iterator(texts, trainer)
        return cls(fast)

    def encode(self, text: str) -> list[int]:
        self.fast.encode_special_tokens = True  # text that spells a special token is text
        return self.fast.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int] | tuple[int, ...] | np.ndarray, *, keep_special: bool = False) -> str:
        return self.fast.decode(_in_vocabulary(ids, self.vocab_size), skip_special_tokens=not keep_special)

    def save(self, folder: str | Path) -> None:
        """Write a Hugging Face tokenizer folder with the same ids."""
        _save_folder(folder, self.fast, {"kind": "bpe"})


class HFTokenizer:
    """A Hugging Face tokenizer folder; `hf` is the transformers object (chat templates live there)."""

    def __init__(self, folder: str | Path, **options: Any) -> None:
        from transformers import AutoTokenizer

        self.folder = str(folder)
        try:  # code that lies in the folder is never run, nor asked about
            self.hf = AutoTokenizer.from_pretrained(self.folder, **{"trust_remote_code": False, **options})
            self.hf.encode("a", add_special_tokens=False)  # a nonsensical setting shows only here
        except Exception as error:  # each kind of tokenizer has its own for a file that is lost, cut or no JSON
            raise ConfigError(f"{folder}: no tokenizer can be read from its files: {describe_error(error)}") from error
        self.vocab_size = len(self.hf)
        if self.vocab_size <= len(set(self.hf.all_special_ids)):  # what some classes make of a lost tokenizer.json
            raise ConfigError(f"{folder}: its tokenizer has special tokens only; is tokenizer.json missing?")
        if self.hf.eos_token_id is None:
            raise ConfigError(f"{folder}: the tokenizer names no eos_token; set it in tokenizer_config.json")
        self.eos_id = int(self.hf.eos_token_id)
        self.bos_id = None if self.hf.bos_token_id is None else int(self.hf.bos_token_id)
        # as base models of Llama, Mistral and Gemma were trained: the post-processor begins every text
        self.adds_bos = self.bos_id is not None and self.hf.encode("a")[:1] == [self.bos_id]
        self.pad_id = self.eos_id if self.hf.pad_token_id is None else int(self.hf.pad_token_id)
        path = Path(folder) / GENERATION
        self.generation = read_json(path, {})
        self.stop_ids: tuple[int, ...] = tuple(
            dict.fromkeys([self.eos_id, *_listed(self.generation, self.vocab_size, path)])
        )

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: no BOS or EOS is added. What a model reads first is begun by rl/chat.py."""
        return self.hf.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int] | tuple[int, ...] | np.ndarray, *, keep_special: bool = False) -> str:
        return self.hf.decode(
            [int(i) for i in ids], skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False
        )

    def save(self, folder: str | Path) -> None:
        self.hf.save_pretrained(str(folder))
        if self.generation:
            write_json(Path(folder) / GENERATION, self.generation)


def _listed(generation: Any, size: int, path: Path) -> list[int]:
    """The ids that generation_config.json ends an answer at: one, or a list."""
    if not isinstance(generation, dict):
        raise ConfigError(f"{path}: must hold a JSON object, not {str(generation)[:60]}")
    named = generation.get("eos_token_id")
    ids = [] if named is None else named if isinstance(named, list) else [named]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ConfigError(f"{path}: eos_token_id must be a token id or a list of them, not {named!r}")
    if beyond := [i for i in ids if i >= size]:
        raise ConfigError(
            f"{path}: eos_token_id names {beyond[0]}, and the tokenizer has {size} tokens; no answer could end there"
        )
    return ids


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a folder: ours when it carries our mark, else through transformers."""
    mark = Path(folder) / MARK
    if not mark.exists():
        return HFTokenizer(folder)
    described = read_json(mark)
    try:
        if described["kind"] == "byte":
            return ByteTokenizer()
        if described["kind"] == "char":
            return CharTokenizer(described["alphabet"])
        if described["kind"] == "pieces":
            return PieceTokenizer(described["pieces"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{mark}: damaged ({describe_error(error)}); copy the folder again") from error
    if described["kind"] == "bpe":
        from tokenizers import Tokenizer as Fast

        file = Path(folder) / "tokenizer.json"
        try:
            return BPETokenizer(Fast.from_file(str(file)))
        except Exception as error:  # tokenizers raises bare ones
            raise ConfigError(f"{file}: cannot be read ({error}); copy the folder again") from error
    raise ConfigError(f"{mark}: unknown kind {described['kind']!r}, expected 'char', 'pieces', 'byte' or 'bpe'")


def own_tokenizer(named: ByPath) -> Tokenizer:
    """The tokenizer that a function of the user's gives, read back from its own files: what a run keeps is what it
    uses.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            made = named.load()()
            save = getattr(made, "save_pretrained", None) or made.save  # one of transformers, or one of ours
            save(folder)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"tokenizer: {named.path} gave none: {by_path_error(error, named.path)}") from error
        return load_tokenizer(folder)


def _in_vocabulary(ids: list[int] | tuple[int, ...] | np.ndarray, size: int) -> list[int]:
    listed = [int(i) for i in ids]
    for i in listed:
        if not 0 <= i < size:
            raise ValueError(f"token id {i} is outside the vocabulary of {size}")
    return listed


def _byte_level_alphabet() -> list[str]:
    """The printable stand-ins that byte-level BPE files use, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_in = {b: chr(b) for b in printable}
    spare = iter(range(0x100, 0x200))
    return [stand_in[b] if b in stand_in else chr(next(spare)) for b in range(256)]


def _joined(pieces: list[str], ids: list[int] | tuple[int, ...] | np.ndarray, keep_special: bool) -> str:
    first = 0 if keep_special else len(SPECIALS)
    return "".join(pieces[i] for i in _in_vocabulary(ids, len(pieces)) if i >= first)


def _save_pieces(folder: str | Path, pieces: list[str], pattern: str, mark: dict[str, Any]) -> None:
    """A folder whose tokens are what the pattern finds in a text, one after the other."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast

    fast = Fast(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=SPECIALS[0]))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    fast.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    _save_folder(folder, fast, mark)


def _save_folder(folder: str | Path, fast: Any, mark: dict[str, Any]) -> None:
    from tokenizers import AddedToken

    fast.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    fast.save(str(out / "tokenizer.json"))
    pad, bos, eos = SPECIALS
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "model_max_length": 1_000_000,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (out / MARK).write_text(json.dumps(mark, ensure_ascii=False) + "\n", encoding="utf-8")
