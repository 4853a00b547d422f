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


def against_the_best(rewards, infos, margin=0.0):
    """An algorithm's advantages: how far a sample falls short of the best of its group."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean - margin * (info["length"] > 3) for reward, info in zip(rewards, infos, strict=True)]


def count_rows(stage, job):
    """A stage: how many steps an earlier one took."""
    return {"steps": job.outcome(stage.after[0])["steps"] * stage.args["times"]}
