"""A trained language model ready to answer: a run's export or any Hugging Face folder, decoded by the embedded
sampler.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError


@dataclass(frozen=True)
class Answer:
    """One continuation: its text, how many tokens went in and came out, and whether it ended by itself."""

    text: str
    prompt_tokens: int
    tokens: int
    finish: str  # "stop" or "length"


def model_folder(path: Path) -> Path:
    """The Hugging Face folder behind a run directory, or the folder itself."""
    if (path / "config.json").is_file():
        return path
    if (path / "config.yaml").is_file():
        if (path / "export" / "config.json").is_file():
            return path / "export"
        newest = max((path / "checkpoints").glob("*/step-*"), key=lambda p: p.stat().st_mtime, default=None)
        hint = (
            f"terrella convert to-hf {newest} FOLDER"
            if newest
            else f"terrella train, until it has a model ({path} has none yet)"
        )
        raise ConfigError(f"{path}: this run has exported no model; try {hint}")
    raise ConfigError(
        f"{path}: neither a run directory nor a Hugging Face folder (it has no config.yaml and no config.json)"
    )


class TextModel:
    """Weights, tokenizer and sampler of one folder."""

    def __init__(self, path: Path) -> None:
        from ..data.tokenizers import load_tokenizer
        from ..rl.rollout.folder import folder_sampler

        self.folder = model_folder(path)
        if not any(
            (self.folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
        ):
            raise ConfigError(f"{self.folder}: has no tokenizer, so it neither reads nor writes text")
        self.tokenizer = load_tokenizer(self.folder)
        self.sampler, self.config = folder_sampler(self.folder)
        self.stop_ids = self.tokenizer.stop_ids

    @property
    def chats(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(getattr(getattr(self.tokenizer, "hf", None), "chat_template", None))

    def chat_prompt(self, messages: list[dict[str, Any]]) -> str:
        """A chat as the model reads it."""
        if not self.chats:
            raise ConfigError(f"{self.folder}: its tokenizer has no chat template; give plain prompts")
        from ..rl.chat import first_prompt

        return first_prompt(self.tokenizer, messages)

    def complete(
        self, prompts: list[str], *, max_new_tokens: int, temperature: float, samples: int = 1, seed: int = 0
    ) -> list[Answer]:
        """`samples` continuations of every prompt, those of one prompt side by side."""
        from ..data.trajectory import Invalid
        from ..rl.chat import with_bos
        from ..rl.rollout.sampler import SampleRequest, SamplingParams

        requests = []
        for number, prompt in enumerate(prompts):
            try:
                ids = tuple(with_bos(self.tokenizer, self.tokenizer.encode(prompt)))
            except ValueError as error:
                raise ConfigError(f"this model's tokenizer cannot spell the prompt: {error}") from error
            room = self.config.max_positions - len(ids)
            if not ids or room < 1:
                raise ConfigError(
                    f"a prompt of {len(ids)} tokens: the model takes 1 to {self.config.max_positions - 1}"
                )
            params = SamplingParams(min(max_new_tokens, room), temperature, stop_ids=self.stop_ids)
            requests += [SampleRequest(ids, (seed, number, sample, 0), params) for sample in range(samples)]
        answers = []
        for request, sample in zip(requests, self.sampler.generate(requests), strict=True):
            if isinstance(sample, Invalid):
                raise ConfigError(f"no answer: {sample.reason}")
            ids = [i for i in sample.ids if i not in self.stop_ids]
            answers.append(Answer(self.tokenizer.decode(ids), len(request.ids), len(sample.ids), sample.finish))
        return answers
