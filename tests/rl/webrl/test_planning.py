"""Planning: a perfect world model finds the right candidate, a corrupted one does not, and all samplers are asked in
batches.
"""

import pytest

from terrella.data.tokenizers import ByteTokenizer
from terrella.data.trajectory import Invalid
from terrella.rl.rollout.sampler import Sample, SamplingParams
from terrella.rl.web_pages.changes import page_changes
from terrella.rl.web_pages.prompt import bare_page_prompt
from terrella.rl.web_pages.tree import items_f1
from terrella.rl.webrl.episode import WebEpisode
from terrella.rl.webrl.plan_config import PlanArm
from terrella.rl.webrl.planning import Imagined, Planner, PredictedPage, commonest
from terrella.rl.webrl.prompts import Prompter
from terrella.rl.webrl.world_data import site_transitions
from terrella.rl.webrl.world_models import (
    CorruptedWorld,
    CriticValue,
    LanguageWorld,
    Progress,
    SampledValue,
    TrueWorld,
    apply_changes,
    brackets,
    oracle_pages,
    read_score,
)
from terrella.rl.worlds.web.actions import parse_call
from terrella.rl.worlds.web.world import WebWorld

TOKENIZER = ByteTokenizer()
PARAMS = SamplingParams(200, 1.0, stop_ids=(TOKENIZER.eos_id,))
SITES = {"sites": ("shopping", "map"), "split": "test", "max_steps": 8}


def tasks(count: int) -> list:
    return [t for t in WebWorld(**SITES).tasks if t.task.template_id in (103, 507)][:count]


class Actor:
    """Proposes the oracle's action in 4 of 20 samples, and links that lead elsewhere in 9 and 7; asked once for all
    of them.
    """

    def __init__(self, known: list, faults: int = 0) -> None:
        self.sizes, self.faults = [], faults
        self.scripts = {}
        for task in known:
            world = WebWorld(**SITES)
            world.open_task(task.task, task.steps)
            while not world.done:
                self.scripts[task.task.intent, world.html] = action = world.demonstrate().split("\n")[-1]
                world.step(action)

    def generate(self, requests):
        self.sizes.append(len(requests))
        return [self.answer(r, n % 20) for n, r in enumerate(requests)]

    def answer(self, request, number):
        if self.faults:
            self.faults -= 1
            return Invalid("engine down")
        text = TOKENIZER.decode(request.ids)
        right = next(
            (
                a
                for (intent, html), a in self.scripts.items()
                if f"Task Instruction: {intent}\n" in text and html in text
            ),
            None,
        )
        wrong = ('do(action="Click", element="1")', 'do(action="Click", element="2")')
        said = right if right and number >= 16 else wrong[number < 9]
        ids = (*TOKENIZER.encode(said), TOKENIZER.eos_id)
        return Sample(ids, (-1.0,) * len(ids), "stop", 0)


def play(arm: PlanArm, known: list, world=None, value=None, faults: int = 0) -> tuple[list[WebEpisode], Planner, Actor]:
    actor = Actor(known, faults)
    planner = Planner(arm, actor, PARAMS, 0, world, value)
    episodes = [WebEpisode(WebWorld(**SITES), t, i, 0, Prompter(TOKENIZER, 20000)) for i, t in enumerate(known)]
    planner.play(episodes)
    return episodes, planner, actor


def scores(episodes: list[WebEpisode]) -> list[float]:
    return [e.world.score for e in episodes]


@pytest.fixture(scope="module")
def known() -> list:
    return tasks(4)


@pytest.fixture(scope="module")
def ways(known) -> dict:
    return {t.task.task_id: oracle_pages(WebWorld(**SITES), t) for t in known}


def spare() -> WebWorld:
    return WebWorld(**SITES)


def test_perfect_world_model_wins_and_a_corrupted_one_does_not(known, ways) -> None:
    episodes, _, actor = play(PlanArm("none"), known)
    assert scores(episodes) == [0.0] * 4 and actor.sizes[0] == 80  # 20 samples of 4 episodes in one call
    arm = PlanArm("true", world="true", stop="valued")
    episodes, planner, _ = play(arm, known, TrueWorld(spare), Progress(ways))
    assert scores(episodes) == [1.0] * 4 and planner.tally.overruled == planner.tally.decisions
    assert planner.tally.checked == planner.tally.exact > 0
    elsewhere = {
        t.task.sites[0]: [p for x in known if x.task.sites == t.task.sites for p in ways[x.task.task_id]] for t in known
    }
    broken = CorruptedWorld(TrueWorld(spare), elsewhere, 1.0, 0)
    episodes, planner, _ = play(PlanArm("bad", world="corrupted", stop="valued"), known, broken, Progress(ways))
    assert sum(scores(episodes)) < 4 and planner.tally.exact < planner.tally.checked
    whole = CorruptedWorld(TrueWorld(spare), elsewhere, 0.0, 0)
    assert scores(play(arm, known, whole, Progress(ways))[0]) == [1.0] * 4


def test_a_deeper_plan_reads_imagined_pages(known, ways) -> None:
    arm = PlanArm("deep", world="true", stop="valued", horizon=2)
    episodes, planner, actor = play(arm, known[:2], TrueWorld(spare), Progress(ways))
    assert scores(episodes) == [1.0] * 2
    assert actor.sizes[:2] == [40, 20 * 3 * 2] and planner.tally.checked == planner.tally.exact > 0


def test_an_exit_among_the_candidates_ends_at_once(known, ways) -> None:
    episodes, _, _ = play(PlanArm("stop", world="true"), known, TrueWorld(spare), Progress(ways))
    assert scores(episodes) == [1.0] * 4  # the actor proposes its exit on the last page only

    class Hasty(Actor):
        def answer(self, request, number):
            ids = (*TOKENIZER.encode('exit(message="")'), TOKENIZER.eos_id)
            return Sample(ids, (-1.0,) * len(ids), "stop", 0) if number == 19 else super().answer(request, number)

    hasty = Planner(
        PlanArm("stop", world="true", branching=4), Hasty(known), PARAMS, 0, TrueWorld(spare), Progress(ways)
    )
    one = WebEpisode(spare(), known[0], 0, 0, Prompter(TOKENIZER, 20000))
    hasty.play([one])
    assert one.world.done and one.world.score == 0.0 and len(one.rounds) == 1


def test_faults_are_invalid_and_retried(known) -> None:
    episodes, _, actor = play(PlanArm("none"), known[:1], faults=20)
    assert episodes[0].fault is None and actor.sizes[:2] == [20, 20]
    episodes, _, _ = play(PlanArm("none"), known[:1], faults=10**6)
    assert episodes[0].fault is not None and "engine down" in episodes[0].fault.reason


def test_commonest_counts_parsed_actions() -> None:
    told = [
        ("nothing", (1,)),
        ('do(action="Click", element="3")', (2,)),
        ('# a\ndo(action="Click",element="3")', (3,)),
        ("exit()", (4,)),
    ]
    found = commonest(told, 2)
    assert [(c.count, c.ids, c.over) for c in found] == [(2, (2,), False), (1, (4,), True)]
    assert commonest(told[:1], 3)[0].response == "nothing"


class Answers:
    """A language model that knows the true changes, or says what it is told."""

    def __init__(self, told=None) -> None:
        self.told, self.asked = told, []

    def generate(self, requests):
        self.asked += [TOKENIZER.decode([i for i in r.ids if i != TOKENIZER.pad_id]) for r in requests]
        return [
            Sample((*TOKENIZER.encode(self.told(k, t)), TOKENIZER.eos_id), (), "stop", 0)
            for k, t in enumerate(self.asked[-len(requests) :])
        ]


def test_a_language_model_predicts_by_lists_of_changes(known, ways) -> None:
    world = spare()
    world.open_task(known[0].task, known[0].steps)
    first = world.render("accessibility")
    act = parse_call(world.demonstrate())
    told = brackets(act, world.page)
    assert (
        told.startswith("type [")
        and told.endswith("] [1]")
        and f"[{told.split('[')[1].split(']')[0]}] textbox" in first
    )
    changes = page_changes(first, ways[known[0].task.task_id][1].tree).write()
    assert items_f1(apply_changes(first, changes) or "", ways[known[0].task.task_id][1].tree) == 1.0
    assert apply_changes(first, "no idea") is None

    def truth(_, prompt: str) -> str:  # the right action leads to the oracle's page, the others change nothing
        task = next(t for t in known if f"OBJECTIVE: {t.task.intent}\n" in prompt)
        tree = prompt.partition("CURRENT OBSERVATION:\n")[2].rpartition("\nCURRENT ACTION:")[0]
        way = [p.tree for p in ways[task.task.task_id]]
        action = prompt.rpartition("CURRENT ACTION: ")[2].strip()
        right = tree in way[:-1] and rights[task.task.task_id][way.index(tree)] == action
        return page_changes(tree, way[way.index(tree) + 1]).write() if right else "gibberish"

    rights = {}
    for task in known:
        world.open_task(task.task, task.steps)
        rights[task.task.task_id] = []
        while not world.done:
            action = world.demonstrate()
            rights[task.task.task_id].append(brackets(parse_call(action), world.page))
            world.step(action)
    model = LanguageWorld(Answers(truth), TOKENIZER, bare_page_prompt, PARAMS, 0, multiple=32)
    episodes, _, _ = play(PlanArm("model", world="model", model="x", stop="valued"), known, model, Progress(ways))
    assert scores(episodes) == [1.0] * 4 and model.unreadable > 0
    assert "PREVIOUS ACTION: type [" in "".join(model.sampler.asked)


def test_values_of_critic_and_language_model(known, ways) -> None:
    episode = WebEpisode(spare(), known[0], 0, 0, Prompter(TOKENIZER, 20000))
    episode.context()
    (candidate,) = commonest([('do(action="Click", element="1")', (1, 2))], 1)
    page = ways[known[0].task.task_id][1]
    state = Imagined(episode, (candidate,), (ways[known[0].task.task_id][0], page))
    seen = []
    assert CriticValue(lambda prompts: seen.extend(prompts) or [0.25])([state]) == [0.25]
    assert page.html in TOKENIZER.decode(seen[0]) and "Round 1" in TOKENIZER.decode(seen[0])
    value = SampledValue(Answers(lambda k, _: "[Score] 0.5" if k % 2 else "none"), TOKENIZER, PARAMS, 0, budget=4)
    assert value([state]) == [0.5] and value.unreadable == 2
    assert [read_score(t) for t in ("[Score] 0.3 [Score]: 0.7", "[Score] 5", "")] == [0.7, None, None]
    assert Progress(ways)([state, Imagined(episode, (), (PredictedPage("[1] RootWebArea 'x'"),))])[0] == pytest.approx(
        2 / 4
    )


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"world": "model"}, "model"),
        ({"value": "critic"}, "critic"),
        ({"world": "model", "model": "m", "horizon": 2}, "horizon"),
        ({"wrong": 2.0}, "wrong"),
        ({"samples": 0}, "samples"),
    ],
)
def test_mistakes_are_named(told: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PlanArm("a", **told)


def test_transitions_of_the_sites_are_true_and_begin_episodes(known) -> None:
    found = list(site_transitions(spare(), spare(), known[:2], 2, seed=0))
    assert [t.previous_action == "" for t in found].count(True) == 2 and found[0].previous_action == ""
    firsts = [t for t in found if t.objective == known[0].task.intent]
    assert len(firsts) >= len(known[0].steps) - 1 and not any(t.action.startswith("stop") for t in found)
    assert firsts[0].action.startswith("type [") and firsts[0].next_observation == firsts[1].observation
    same = [items_f1(apply_changes(t.observation, t.changes.write()) or "", t.next_observation) for t in found]
    # the place of an updated item may be a guess
    assert min(same) > 0.9 and sum(s == 1.0 for s in same) >= 0.9 * len(same)
