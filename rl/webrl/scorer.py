"""Log-probs of given texts under a Hugging Face folder, without an engine: what the release's data scripts ask of a
model. Shapes: T tokens, H hidden, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ...core.errors import ConfigError
from ...data.tokenizers import load_tokenizer
from ...models.decode import Decoder, KVCache, decode_weights
from ...models.families import parameter_names
from ...models.hf import read_config, weight_source
from .orm import NO, YES
from .prompts import Prompter, single_token
from .replay import geometric_mean

CHUNK = 512  # tokens whose logits are held together


class FolderScorer:
    """One model, one text at a time."""

    def __init__(self, folder: Path, limit: int = 16384) -> None:
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder}: holds no config.json; name a Hugging Face folder")
        self.config, self.tokenizer = read_config(folder), load_tokenizer(folder)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        source, _ = weight_source(folder, self.config)
        named = {name: source(name).to(device) for name in parameter_names(self.config)}
        self.limit = min(limit, self.config.max_positions)
        self.decoder = Decoder(decode_weights(named, self.config), self.config, self.limit)

    @torch.no_grad()
    def hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """Hidden states of a text, [T, H]."""
        like = self.decoder.weights.embedding
        ids_1T = torch.tensor([list(ids)], dtype=torch.int64, device=like.device)
        return self.decoder.forward(ids_1T, KVCache(self.config, 1, len(ids), like))[0]

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], action: Sequence[int]) -> list[float]:
        """Log-probs of the action's tokens. Where both are too long the beginning of the prompt is left out, as the
        release does.
        """
        if not 0 < len(action) < self.limit:
            raise ConfigError(f"an action has {len(action)} tokens, not 1 to {self.limit - 1}; leave its step out")
        prompt = list(prompt)[-(self.limit - len(action)) :]
        hidden_TH = self.hidden([*prompt, *action])[len(prompt) - 1 : -1]
        found: list[float] = []
        for at in range(0, len(action), CHUNK):
            logits_TV = hidden_TH[at : at + CHUNK].float() @ self.decoder.weights.head.float().T
            chosen = torch.tensor(list(action[at : at + CHUNK]), device=logits_TV.device)
            found += logits_TV[:, : self.config.vocab].log_softmax(-1).gather(1, chosen[:, None])[:, 0].tolist()
        return found

    def probability(self, observation: str, action: str) -> float:
        """The geometric mean of an action's token probabilities, without the token that would end it."""
        prompter = Prompter(self.tokenizer, self.limit - 1)
        prompt = [*prompter.begin, *self.tokenizer.encode(prompter.headers.translate(observation))]
        return geometric_mean(self.logprobs(prompt, self.tokenizer.encode(action)))

    def yes(self, intent: str, responses: Sequence[str], html: str) -> float:
        """P(YES) against NO of an outcome reward model; only the page is cut to fit."""
        prompt, _ = Prompter(self.tokenizer, self.limit - 1).verdict(intent, responses, html)
        words = [single_token(self.tokenizer, word) for word in (YES, NO)]
        logits = self.hidden(prompt)[-1].float() @ self.decoder.weights.head[words].float().T
        return float(torch.sigmoid(logits[0] - logits[1]))
