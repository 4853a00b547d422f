"""A language model as judge of free answers, behind any OpenAI-compatible address. Off unless a judge is given."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ...chat_completion import NO_ANSWER, complete
from ..base import WorldFault

_ANSWER = """Compare the answer of a student with the answer of the teacher. \
The wording may differ; what counts is the meaning.
Question: {intent}
Answer of the teacher: {reference}
Answer of the student: {answer}
End with one word alone: correct, incorrect, or partially correct."""
_REASON = """A task cannot be done. Compare the true reason with the reason that was reported.
Task: {intent}
True reason: {reference}
Reported reason: {answer}
End with one word alone: same, or different."""


@dataclass(frozen=True)
class Judge:
    """Where the judge is. The key is read from the environment and stands in no file."""

    url: str  # of the API, such as http://host:8000/v1
    model: str
    key_variable: str = "OPENAI_API_KEY"
    deadline_s: float = 60.0

    def same_answer(self, intent: str, reference: str, answer: str) -> float:
        """1.0 when the judge calls the answer correct; partially correct is not."""
        verdict = self._ask(_ANSWER.format(intent=intent, reference=reference, answer=answer))
        if "partially correct" in verdict or "incorrect" in verdict:
            return 0.0
        if "correct" in verdict:
            return 1.0
        raise WorldFault(f"web: the judge gave no verdict: {verdict[-80:]!r}")

    def same_reason(self, intent: str, reference: str, answer: str) -> float:
        """1.0 when the judge finds the reported reason to be the true one."""
        verdict = self._ask(_REASON.format(intent=intent, reference=reference, answer=answer))
        if "different" in verdict:
            return 0.0
        if "same" in verdict:
            return 1.0
        raise WorldFault(f"web: the judge gave no verdict: {verdict[-80:]!r}")

    def _ask(self, text: str) -> str:
        messages = [{"role": "user", "content": text}]
        body = {"model": self.model, "temperature": 0, "max_tokens": 768, "messages": messages}
        try:
            key = os.environ.get(self.key_variable, "")
            return str(complete(self.url, body, key, self.deadline_s)["content"]).lower()
        except NO_ANSWER as error:
            raise WorldFault(f"web: the judge at {self.url} did not answer: {type(error).__name__}") from error
