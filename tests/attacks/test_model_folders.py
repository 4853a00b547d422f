"""A user's model folder under attack: its config, tokenizer and generation settings changed by a seeded draw. Read,
or refused by file.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from terrella.core.errors import ConfigError, TerrellaError
from terrella.data.tokenizers import ByteTokenizer, load_tokenizer
from terrella.models.config import ModelConfig
from terrella.models.families import write_hf_config
from terrella.models.hub import sizes_of

SEED = 20261116
SIZES = ModelConfig(
    family="qwen2", layers=1, hidden=32, heads=2, kv_heads=2, head_dim=16, ffn=48, vocab=300, qkv_bias=True
)
HOSTILE = [
    "null",
    "-1",
    "1e999",
    "NaN",
    "[]",
    "{}",
    '"x"',
    "true",
    "9" * 5000,
    "0",
    "99999999",
    '"../../etc/passwd"',
    "[[",
    "0.5",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "whole"
    ByteTokenizer().save(folder)
    (folder / "terrella_tokenizer.json").unlink()  # as transformers reads it
    (folder / "config.json").write_text(json.dumps(write_hf_config(SIZES, "float32"), indent=1))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 13], "pad_token_id": 0, "temperature": 0.6}, indent=1)
    )
    return folder


def use(folder: Path) -> tuple[int, ...]:
    """What a recipe asks of `model: {folder: ...}` before any weight is read."""
    sizes_of(str(folder))
    words = load_tokenizer(folder)
    assert words.decode(words.encode("a b"))
    return words.stop_ids


def damage(path: Path, draw: random.Random) -> None:
    held, how = path.read_bytes(), draw.randrange(5)
    data, place = bytearray(held), draw.randrange(len(held))
    if how == 0:
        data[place] ^= 1 << draw.randrange(8)
    elif how == 1:
        del data[place:]
    elif how == 2:
        path.unlink()
        return
    else:
        lines = held.decode().split("\n")
        values = [i for i, line in enumerate(lines) if ": " in line]
        chosen = draw.choice(values or [0])
        lines[chosen] = f"{lines[chosen].split(': ')[0]}: {draw.choice(HOSTILE)}" + (
            "," if lines[chosen].endswith(",") else ""
        )
        data = bytearray("\n".join(lines).encode())
    path.write_bytes(bytes(data))


def attack(count: int, whole: Path, folder: Path, seed: int) -> dict[str, int]:
    counts = {"read": 0, "refused": 0}
    for i in range(count):
        draw = random.Random(f"{seed}/{i}")
        attacked = Path(shutil.copytree(whole, folder / f"attacked-{i}"))
        damage(draw.choice(sorted(attacked.iterdir())), draw)
        try:
            use(attacked)
            counts["read"] += 1
        except TerrellaError as error:
            assert attacked.name in str(error), str(error)
            counts["refused"] += 1
        shutil.rmtree(attacked)
    return counts


def test_model_folders(whole: Path, tmp_path: Path) -> None:
    assert use(whole) == (2, 13)
    counts = attack(40, whole, tmp_path, SEED)
    print(counts)
    assert counts["refused"] >= 15 and counts["read"] >= 5


@pytest.mark.full
def test_all_model_folders(whole: Path, tmp_path: Path) -> None:
    counts = attack(400, whole, tmp_path, SEED + 1)
    print(counts)
    assert counts["refused"] >= 150


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("generation_config.json", [2], r"generation_config\.json: must hold a JSON object, not \[2\]"),
        (
            "generation_config.json",
            {"eos_token_id": [2, 10**9]},
            r"eos_token_id names 1000000000, and the tokenizer has 26. tokens",
        ),
        ("generation_config.json", {"eos_token_id": "</s>"}, r"eos_token_id must be a token id or a list of them"),
        ("terrella_tokenizer.json", {"kind": "char", "alphabet": "aa"}, r"terrella_tokenizer\.json: damaged"),
        ("terrella_tokenizer.json", {}, r"terrella_tokenizer\.json: damaged \(KeyError: 'kind'"),
        ("terrella_tokenizer.json", {"kind": "x"}, r"terrella_tokenizer\.json: unknown kind 'x'"),
    ],
)
def test_what_lies_is_named(whole: Path, tmp_path: Path, file: str, change: object, words: str) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    (folder / file).write_text(json.dumps(change))
    with pytest.raises(ConfigError, match=words) as caught:
        use(folder)
    assert str(folder) in str(caught.value)


def test_a_lost_tokenizer_is_named(whole: Path, tmp_path: Path) -> None:
    """transformers makes one of special tokens alone, which turns every text into nothing."""
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ConfigError, match=r"special tokens only; is tokenizer\.json missing"):
        load_tokenizer(folder)


def test_no_code_of_the_folder_runs(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    mapped = {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"], "AutoConfig": "own.Own"}}
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text(
            json.dumps({"model_type": "own", "tokenizer_class": "Own", "eos_token": "<eos>", **mapped})
        )
    with pytest.raises(ConfigError, match=f"{folder}: no tokenizer can be read from its files: .*trust_remote_code"):
        load_tokenizer(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text",
    ["config: {}", "- 1", "", "config: [", "config: {num_attention_heads: 0, hidden_size: 8, num_layers: x}", "a: \0"],
)
def test_settings_of_a_nemo_folder_that_are_none(tmp_path: Path, text: str) -> None:
    from terrella.models.nemo import read_settings

    (tmp_path / "model.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"model\.yaml: "):
        read_settings(tmp_path / "model.yaml", lambda: 8)
