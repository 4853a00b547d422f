"""Agent episodes: token-exact contexts and masks, rewards, windows, faults, chat templates of real tokenizers."""

import json

import pytest

from terrella.core.errors import ConfigError
from terrella.data.tokenizers import ByteTokenizer, HFTokenizer
from terrella.data.trajectory import Invalid, Role
from terrella.rl.agents.episode import AgentEpisode, AgentSettings
from terrella.rl.agents.format import parse
from terrella.rl.chat import PLAIN, chat_of
from terrella.rl.rollout.episodes import rollout
from terrella.rl.rollout.sampler import Sample, SampleRequest, SamplingParams
from terrella.rl.worlds.sokoban import ACTIONS, decode, shortest_solution
from terrella.rl.worlds.tasks import load_tasks

TASKS = load_tasks()
TOKENIZER = ByteTokenizer()
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Solver:
    """A sampler that reads the last state off the context and answers with the next actions of a shortest solution."""

    def __init__(self, per_turn: int = 1) -> None:
        self.per_turn, self.contexts = per_turn, []

    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
        out = []
        for request in requests:
            text = TOKENIZER.decode(request.ids)
            self.contexts.append(text)
            grid = text.rsplit("State:\n", 1)[1].split("\nYou have")[0]
            plan = [ACTIONS[a] for a in shortest_solution(decode(grid)) or ()][: self.per_turn]
            ids = (*TOKENIZER.encode(f" push </think> <answer> {' || '.join(plan)} </answer>"), TOKENIZER.eos_id)
            out.append(Sample(ids, (-0.5,) * len(ids), "stop", 7))
        return out


def episode(tag: str = "SimpleSokoban", seed: int = 123, **settings: object) -> AgentEpisode:
    return AgentEpisode(TASKS[tag], seed, 0, 0, TOKENIZER, PLAIN, AgentSettings(**settings))


def test_a_solver_wins_and_masks_cover_exactly_what_it_sampled() -> None:
    episodes = [episode(seed=seed, max_turns=10) for seed in range(123, 133)]
    trajectories = rollout(Solver(), episodes, SamplingParams(100), 0)
    for one, trajectory in zip(episodes, trajectories, strict=True):
        assert trajectory.info["success"] and trajectory.info["format_ok"] == 1.0 and trajectory.info["penalty"] == 0
        assert trajectory.reward == pytest.approx(11.0 - 0.1 * trajectory.info["num_actions"])
        assert (
            len(trajectory.sequences) == len(one.parsed) == trajectory.info["num_actions"]
            and len(one.states) == len(one.parsed) + 1
        )
        for sequence, turn in zip(trajectory.sequences, one.turns, strict=True):
            sampled = tuple(i for i, role in zip(sequence.ids, sequence.roles, strict=True) if role is Role.ACTION)
            assert sampled == turn.answer and sampled[-1] == TOKENIZER.eos_id
        for earlier, later in zip(trajectory.sequences, trajectory.sequences[1:], strict=False):
            assert later.ids[: len(earlier.ids)] == earlier.ids  # contexts grow by what was sampled, id by id


def test_window_shows_the_last_turns_only() -> None:
    solver = Solver()
    rollout(solver, [episode(seed=125, max_turns=10, window=1)], SamplingParams(100), 0)
    assert len(solver.contexts) == 5
    for number, text in enumerate(solver.contexts, start=1):
        assert (
            text.count("Turn ") == 1
            and f"Turn {number}:" in text
            and "Your available actions are" in text
            and "Reward:" not in text
        )
        assert text.endswith("\nAgent:\n<think>")


def test_budget_of_actions_and_turns_and_the_penalty() -> None:
    class Walker:
        def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
            ids = tuple(TOKENIZER.encode(" x </think> <answer> Up || fly || Up || Up || Up || Up </answer>"))
            return [Sample(ids, (0.0,) * len(ids), "length", 0) for _ in requests]

    (walked,) = rollout(Walker(), [episode(seed=123)], SamplingParams(10), 0)
    # Five words a turn, one of them unknown: four steps and one penalty each turn, cut at ten actions in the third.
    assert walked.info["num_actions"] == 10 and walked.info["turns"] == 3 and not walked.info["success"]
    assert (
        walked.info["penalty"] == pytest.approx(-0.3)
        and walked.reward == pytest.approx(-1.3)
        and walked.info["action_is_effective"] == 0
    )
    (short,) = rollout(Walker(), [episode(seed=123, max_turns=1)], SamplingParams(10), 0)
    assert short.info["num_actions"] == 4 and short.info["turns"] == 1


def test_coordinates_are_shown_and_asked_for() -> None:
    one = episode(fmt="state", coordinates=True)
    text = TOKENIZER.decode(one.context())
    assert (
        "Player (P) is at (3,2); box (X) is at (3,1); target (O) is at (2,1).\nYou have 10" in text
        and "<prediction> [next state]" in text
    )
    assert parse(
        "<think>" + " <observation>a</observation> b <prediction>c</prediction> </think><answer>Up</answer>", "state", 5
    ).ok


def test_a_fault_of_the_world_is_invalid() -> None:
    class Clumsy(Solver):
        def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
            for one in episodes:
                one.world.codes = None  # the world loses its state
            ids = tuple(TOKENIZER.encode(" x </think> <answer> Up </answer>"))
            return [Sample(ids, (0.0,) * len(ids), "stop", 0) for _ in requests]

    episodes = [episode()]
    (broken,) = rollout(Clumsy(), episodes, SamplingParams(10), 0)
    assert isinstance(broken.reward, Invalid) and "before reset" in broken.reward.reason


def test_chat_template_of_a_real_tokenizer(tmp_path) -> None:
    TOKENIZER.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHATML}))
    hf = HFTokenizer(tmp_path)
    chat = chat_of(hf)
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
    ]
    messages.append({"role": "user", "content": "V"})
    whole = hf.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.start + "S" + chat.first_user + "U" + chat.agent + "A" + chat.next_user + "V" + chat.agent == whole
    assert chat_of(TOKENIZER) == PLAIN
    hf.hf.chat_template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    with pytest.raises(ConfigError, match=rf"{tmp_path}: its chat_template must show system, user, assistant messages"):
        chat_of(hf)
