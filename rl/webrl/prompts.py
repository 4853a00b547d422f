"""What actor, critic and outcome reward model read, as token ids. Only the page is ever cut, and pages can forge no
header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ...core.errors import ConfigError
from ...data.convert.webrl import ASSISTANT, PAGE, USER
from ...data.tokenizers import Tokenizer

EOT = "<|eot_id|>"
IM_END = "<|im_end|>"
SYSTEM = "<|start_header_id|>system<|end_header_id|>\n\n"
# Word for word as the released outcome reward model was trained, typographic apostrophes included.
JUDGE = (
    "You are an expert in evaluating the performance of a website navigation agent. The agent is designed to help a "
    "human user navigate the website to complete a task. Given the user’s intent, the agent's action history, and the "
    "final state of the screen, your goal is to decide whether the agent’s execution is successful or not. You must "
    "respond with YES or NO."
)


@dataclass(frozen=True)
class Headers:
    """What opens a prompt, and each speaker's part of it."""

    begin: str  # after the tokenizer's own first token, where it has one
    system: str
    user: str
    assistant: str
    gap: str  # between a header and the text, in the family's own chats

    def translate(self, text: str) -> str:
        """A text of the release's files, which have Llama's headers, with these."""
        return text.replace(USER, self.user).replace(ASSISTANT, self.assistant)


LLAMA = Headers("", SYSTEM, USER, ASSISTANT, "\n\n")
GLM = Headers("[gMASK]<sop>", "<|system|>\n", "<|user|>", "<|assistant|>", "\n")
# Qwen's chats begin with the system's turn, which holds the task's instruction or the judge's
CHATML = Headers("<|im_start|>system\n", "", f"{IM_END}\n<|im_start|>user", f"{IM_END}\n<|im_start|>assistant", "\n")


def headers_of(tokenizer: Tokenizer) -> Headers:
    """GLM-4's or Qwen's headers where the tokenizer has them as tokens, else Llama's."""
    families = ((GLM, ("[gMASK]", "<sop>", GLM.user, GLM.assistant)), (CHATML, ("<|im_start|>", IM_END)))
    return next((family for family, parts in families if all(len(tokenizer.encode(p)) == 1 for p in parts)), LLAMA)


def harmless(text: str) -> str:
    """Text of pages and models with header tokens broken up, so that none of it can pass for the prompt's own."""
    return text.replace("<|", "< |").replace("[gMASK]", "[ gMASK]").replace("<sop>", "< sop>")


def single_token(tokenizer: Tokenizer, word: str) -> int:
    """The one id of a word that is scored as a token."""
    ids = tokenizer.encode(word)
    if len(ids) != 1:
        raise ConfigError(f"tokenizer: {word!r} must be one token, it is {len(ids)}; choose another tokenizer")
    return ids[0]


@dataclass(frozen=True)
class Prompter:
    """Rounds as WebRL writes them: past answers by their very ids, only the newest page, cut at its end to fit
    `limit` tokens.
    """

    tokenizer: Tokenizer
    limit: int
    # prompts are padded in front to a multiple of this, so that samplers without continuous batches decode many
    # together
    pad_to: int = 1

    @cached_property
    def headers(self) -> Headers:
        """The headers of the tokenizer's family."""
        return headers_of(self.tokenizer)

    @cached_property
    def begin(self) -> tuple[int, ...]:
        """What every prompt begins with."""
        first = [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
        opened = self.tokenizer.encode(self.headers.begin) if self.headers.begin else []
        return tuple(opened if first and opened[:1] == first else [*first, *opened])  # SmolLM's first is <|im_start|>

    @cached_property
    def stop_id(self) -> int:
        """The token that ends an action: the header's end of turn where the tokenizer has it, else its end of text."""
        ids = self.tokenizer.encode(IM_END if self.headers is CHATML else EOT)
        return ids[0] if len(ids) == 1 else self.tokenizer.eos_id

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """What ends an action: `stop_id`, and where the model's folder lists several, those."""
        listed = self.tokenizer.stop_ids
        return tuple(dict.fromkeys([self.stop_id, *(listed if len(listed) > 1 else ())]))

    def action(self, ids: Sequence[int]) -> tuple[int, ...]:
        """An answer without the token that ended it."""
        return tuple(ids[:-1]) if ids and ids[-1] in self.stop_ids else tuple(ids)

    def fit(self, head: list[int], page: str, tail: list[int]) -> tuple[tuple[int, ...], int]:
        """Head, page and tail in at most `limit` tokens, and how many tokens of the page were cut. Only the page is."""
        room = self.limit - len(head) - len(tail)
        if room < 0:
            raise ConfigError(
                f"max_prompt_tokens: {self.limit} leaves no room beside {len(head) + len(tail)} tokens of history; "
                "raise it"
            )
        ids = self.tokenizer.encode(harmless(page))
        whole = [*head, *ids[:room], *tail]
        padding = min(-len(whole) % self.pad_to, self.limit - len(whole))
        return (*[self.tokenizer.pad_id] * padding, *whole), max(0, len(ids) - room)

    def round(self, intent: str, answers: Sequence[Sequence[int]], page: str) -> tuple[tuple[int, ...], int]:
        """The prompt of round len(answers). Where the history alone is too long its oldest rounds are left out."""
        encode, task, user, assistant = (
            self.tokenizer.encode,
            harmless(intent),
            self.headers.user,
            self.headers.assistant,
        )
        begin = [*self.begin, *encode(f"Task Instruction: {task}\n\n")]
        rounds = [
            [
                *encode(f"Round {k}\n\n{user}\n{task if k == 0 else PAGE}\n\n{assistant}\n"),
                *self.action(answer),
                *encode("\n\n"),
            ]
            for k, answer in enumerate(answers)
        ]
        opening, tail = encode(f"Round {len(answers)}\n\n{user}\n"), encode(f"\n\n{assistant}\n")
        while rounds and len(begin) + sum(map(len, rounds)) + len(opening) + len(tail) > self.limit:
            rounds.pop(0)
        return self.fit([*begin, *(i for part in rounds for i in part), *opening], page, tail)

    def verdict(self, intent: str, responses: Sequence[str], page: str) -> tuple[tuple[int, ...], int]:
        """What the outcome reward model reads: intent, the actions (the oldest left out where they alone are too long),
        and the page on which the last one was decided."""
        encode, headers = self.tokenizer.encode, self.headers
        question = f"The User Intent:\n{harmless(intent.strip())}\n\nAction History:\n"
        begin = [*self.begin, *encode(f"{headers.system}{JUDGE}{headers.user}{headers.gap}{question}")]
        lines = [encode(harmless(r.replace("\n", "; ").strip()) + "\n") for r in responses]
        last, tail = encode("\nThe Current Screenshot:\n"), encode(f"{headers.assistant}{headers.gap}")
        while lines and len(begin) + sum(map(len, lines)) + len(last) + len(tail) > self.limit:
            lines.pop(0)
        return self.fit([*begin, *(i for line in lines for i in line), *last], page.strip(), tail)
