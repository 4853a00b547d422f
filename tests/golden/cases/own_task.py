"""A user's own task, as the golden cases have it: a reward for rows of data, and an environment of two turns."""

from terrella.rl.environment import Environment


def score(prompt, answer, info):
    """Half of the reward for any digit, all of it for the right answer."""
    right = answer.strip().startswith(info["answer"])
    return {"reward": 1.0 if right else 0.5 * answer[:1].isdigit(), "length": len(answer)}


class Echo(Environment):
    """Say a letter, and say it again."""

    def __init__(self, letters: str = "abcdefgh") -> None:
        self.letters = letters

    def tasks(self, split):
        return [{"letter": c} for c in (self.letters if split == "train" else self.letters.upper())]

    def play(self, task):
        first = yield [{"role": "system", "content": "Echo."}, {"role": "user", "content": task["letter"]}]
        second = yield f"again {task['letter']}"
        return sum(0.25 * answer[:1].isalpha() + 0.25 * (answer[:1] == task["letter"]) for answer in (first, second))

    def demonstration(self, task):
        return [task["letter"]] * 2

    def baselines(self):
        return {"always a": lambda prompt, task: "a"}
