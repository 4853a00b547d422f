"""A small Hugging Face folder in place of a large one: fresh weights of the same family, and a tokenizer for any
text.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ..core.files import make_folder, write_json
from .config import ModelConfig
from .families import write_hf_config
from .folder import CARRIED

GENERATION = "generation_config.json"  # lists what ends an answer
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
WHOLE = ("YES", "NO")  # one token each, as reward models that are asked for a word need it
# a family's own, by which its prompts are chosen
HEADERS = {"glm": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")}
# what ends an answer, where a family's folders list more than the end of a message
STOPS = {"glm": ("<|endoftext|>", "<|user|>", "<|observation|>")}


def byte_vocab(family: str = "") -> int:
    """How many ids the tokenizer has that stands in for one that is not there."""
    return 256 + len(SPECIALS) + len(HEADERS.get(family, ())) + len(WHOLE)


def write_byte_tokenizer(folder: Path, family: str = "") -> None:
    """A tokenizer folder of transformers with one id for each byte and a chat template, as most models have one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    make_folder(folder)
    fast = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    # pyright: ignore[reportAttributeAccessIssue]
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    fast.add_special_tokens(
        [AddedToken(piece, special=True, normalized=False) for piece in (*SPECIALS, *HEADERS.get(family, ()))]
    )
    fast.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in WHOLE])
    fast.save(str(folder / "tokenizer.json"))
    named = {
        "eos_token": SPECIALS[1],
        "pad_token": SPECIALS[2],
        "chat_template": CHAT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named}), encoding="utf-8"
    )
    stops = [fast.token_to_id(piece) for piece in STOPS.get(family, SPECIALS[1:2])]
    write_json(folder / GENERATION, {"eos_token_id": stops})


def copy_tokenizer(source: Path, folder: Path) -> None:
    """The tokenizer of another folder, with what says how text ends."""
    make_folder(folder)
    for name in {*CARRIED, *(p.name for p in source.glob("*tokenizer*"))}:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def write_weights(config: ModelConfig, folder: Path) -> None:
    """Fresh fp32 weights and config.json, as transformers itself writes them. What ends an answer stays as the folder's
    tokenizer has it: the family's own ids would lie outside a small vocabulary."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    said = folder / GENERATION
    kept = said.read_bytes() if said.is_file() else None
    stops = json.loads(kept).get("eos_token_id") if kept else None
    hf_config = write_hf_config(config, "float32") | {"pad_token_id": None, "bos_token_id": None, "eos_token_id": stops}
    theirs = AutoConfig.for_model(
        hf_config.pop("model_type"), **{k: v for k, v in hf_config.items() if k not in ("torch_dtype", "dtype")}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(theirs, dtype=torch.float32).save_pretrained(folder)
    said.unlink(missing_ok=True)  # transformers writes one of its own
    if kept is not None:
        said.write_bytes(kept)
