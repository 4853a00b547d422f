"""Text games and web pages as environments: lessons, order, episodes, and the tables of an evaluation."""

from dataclasses import replace
from pathlib import Path

import pytest

from terrella.core.errors import ConfigError
from terrella.data.convert.text_game import is_gold, pair_of
from terrella.data.schema import PAIR
from terrella.data.shards import ShardWriter
from terrella.data.tokenizers import ByteTokenizer, load_tokenizer
from terrella.data.trajectory import Invalid, Role
from terrella.rl.conversation import Scripted
from terrella.rl.evaluation import Evaluation
from terrella.rl.language import prompt_ids
from terrella.rl.language_tasks import Made, Pairs
from terrella.rl.text_games.config import TextGameEnvironment
from terrella.rl.text_games.crawl import GAMES, bare_prompt, crawl
from terrella.rl.text_games.tasks import TextGameTasks
from terrella.rl.text_games.world import true_predictor
from terrella.rl.web_pages.config import WebPageEnvironment
from terrella.rl.web_pages.data import load_transitions, page_pair
from terrella.rl.web_pages.prompt import bare_page_prompt
from terrella.rl.web_pages.tasks import WebPageTasks

TOKENIZER = ByteTokenizer()
GAME = TextGameEnvironment(kind="text-game", data="data", games=["weigh-stones"], pad_prompts_to=64)
PAGE = WebPageEnvironment(kind="web-page", data="data", pad_prompts_to=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of games and of pages, as data stages leave them."""
    folder = tmp_path_factory.mktemp("made")
    rows = list(crawl(GAMES["weigh-stones"], range(1)))
    gold, others = [r for r in rows if is_gold(r)], [r for r in rows if not is_gold(r)]
    samples = {"train": [*gold[:6], *others[:18]], "test": [*gold[6:10], *others[18:22]]}
    steps = load_transitions()[:12]
    for part, chosen in samples.items():
        with ShardWriter(folder / "games" / part, kind=PAIR) as writer:
            for number, row in enumerate(chosen):
                sample = pair_of(row, bare_prompt, part)
                if part == "train" and number == 0:  # somebody reasoned
                    sample["extra.json"]["response"] = "Well. The final answer is: {}"
                writer.write(sample)
        with ShardWriter(folder / "pages" / part, kind=PAIR) as writer:
            for step in steps:
                writer.write(page_pair(step, bare_page_prompt, part))
    return folder


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("extra.json", {"state": "{no json"}),
        ("extra.json", {"state": {"game_state": []}}),
        ("target.json", {"game_state": []}),
        ("target.json", {}),
    ],
)
def test_a_row_that_is_no_pair_is_named_with_its_folder(tmp_path: Path, field: str, changed: dict) -> None:
    sample = pair_of(next(crawl(GAMES["weigh-stones"], range(1))), bare_prompt, "train")
    sample[field] = {**sample[field], **changed} if changed else changed
    with ShardWriter(tmp_path / "rows", kind=PAIR) as writer:
        writer.write(sample)
    with pytest.raises(ConfigError, match=f"env: sample 0 of {tmp_path / 'rows'} is no pair of question and answer"):
        Pairs(tmp_path / "rows", "text-game")[0]


def games(folder: Path, max_length: int | None = None, **settings) -> TextGameTasks:
    return TextGameTasks(replace(GAME, **settings), Made("data", folder / "games", {}), TOKENIZER, max_length)


def pages(folder: Path) -> WebPageTasks:
    return WebPageTasks(PAGE, Made("data", folder / "pages", {}), TOKENIZER, None)


def test_lessons_are_the_answers_and_padding_is_in_front(folder: Path) -> None:
    tasks = games(folder)
    train = tasks.of("train")
    taught, bare = (lessons[0] for lessons in tasks.lessons(train[:2], "here"))
    for task, lesson in ((train[0], taught), (train[1], bare)):
        learnt = [i for i, role in zip(lesson.ids, lesson.roles, strict=True) if role != Role.PROMPT]
        assert learnt == [*TOKENIZER.encode(task.lesson), TOKENIZER.eos_id]
        prompt = prompt_ids(TOKENIZER, task.prompt, 64)
        assert len(prompt) % 64 == 0 and lesson.ids[: len(prompt)] == prompt
    assert (
        train[0].lesson.startswith("Well.")
        and train[0].answer != train[0].lesson
        and train[1].lesson == train[1].answer
    )
    with pytest.raises(ConfigError, match=r"here: data: prompt and answer have .* model.max_positions is 64"):
        games(folder, max_length=64).lessons(train[:1], "here")


def test_rows_without_a_change_are_mixed_in(folder: Path) -> None:
    tasks = games(folder, non_gold_ratio=0.5)
    order, gold = tasks.order(3, without=[0]), [question.gold for question in tasks.of("train")]
    epoch = [order(place) for place in range(7)]  # five that change, and 2.5 beside them
    assert (
        sum(gold[i] for i in epoch) == 5
        and 0 not in epoch
        and epoch == [tasks.order(3, without=[0])(place) for place in range(7)]
    )
    whole = games(folder, non_gold_ratio=None).order(3)
    assert sorted(whole(place) for place in range(24)) == list(range(24))


def test_before_its_stage_has_finished_an_environment_shows_an_example(folder: Path) -> None:
    tasks = TextGameTasks(GAME, Made("data", folder / "games", {}, finished=False), TOKENIZER, None)
    (question,) = tasks.of("train")
    assert question.domain == "text-game" and question.prompt and tasks.lessons([question], "here")
    (page,) = WebPageTasks(PAGE, Made("data", folder / "pages", {}, finished=False), TOKENIZER, None).of("test")
    assert page.domain == "web-page"


def test_an_environment_makes_its_questions_and_a_tokenizer_from_them(tmp_path: Path) -> None:
    written: list[int] = []
    made = Made("data", tmp_path / "data", {"samples_per_shard": 8}, finished=False, vocab=400)
    chosen = replace(GAME, seeds=1, heldout_per_verb=2)
    counts = TextGameTasks(chosen, made, TOKENIZER, None).make(lambda: written.append(1))
    learnt = load_tokenizer(made.folder / "tokenizer")
    tasks = TextGameTasks(chosen, replace(made, finished=True), learnt, None)
    assert written and (len(tasks.of("train")), len(tasks.of("test"))) == (counts["train_rows"], counts["test_rows"])
    assert 0 < counts["test_changed"] < counts["test_rows"] and learnt.vocab_size <= 400


@pytest.mark.parametrize("change", [{"games": ["charge-torch", "weigh-stons"]}, {"unseen_games": ["weigh-stons"]}])
def test_a_game_that_is_none_is_refused_before_the_run(change: dict, tmp_path: Path) -> None:
    made = Made("data", tmp_path, {}, finished=False)
    with pytest.raises(ConfigError, match="games: 'weigh-stons' is not one of bake-loaf"):
        TextGameTasks(replace(GAME, **change), made, TOKENIZER, None).require_source()


def test_questions_in_shards_are_counted_and_left_where_they_are(folder: Path, tmp_path: Path) -> None:
    shards = replace(GAME, games=[], test=str(folder / "games" / "test"))
    tasks = TextGameTasks(shards, Made("data", tmp_path, {}, finished=False), TOKENIZER, None)
    assert tasks.make(lambda: None) == {"pad_prompts_to": 64, "test_rows": 8} and not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"data\.prompts: all of these questions are made; leave it out"):
        TextGameTasks(shards, Made("data", tmp_path, {"prompts": 4}), TOKENIZER, None).require_source()


def test_questions_of_another_kind_are_refused(folder: Path) -> None:
    mixed = TextGameTasks(GAME, Made("data", folder / "pages", {}), TOKENIZER, None)
    with pytest.raises(ConfigError, match="holds questions of the kind web-page, not text-game"):
        mixed.of("train")[0]


def evaluated(tasks, models: dict[str, list[str | Invalid]], **names) -> Evaluation:
    """Answers of several models, played and judged as the stage does."""
    parts, judged = tasks.parts(8), {}
    for name, answers in models.items():
        episodes = [tasks.episode(task, i, 0) for i, task in enumerate(parts["test"])]
        played = tasks.play(
            Scripted(TOKENIZER, lambda i, turn, answers=answers: answers[i]), episodes, tasks.params(4000, 1.0), 0
        )
        for temperature in (0.0, 1.0):
            judged[name, temperature, "test"] = [[judgement] for judgement in tasks.judgements(episodes, played)]
    return Evaluation(list(models), [0.0, 1.0], 1, parts, judged, **names)


def test_tables_of_games(folder: Path) -> None:
    tasks = games(folder)
    truth: list[str | Invalid] = [question.answer for question in tasks.of("test")]
    models = {"sft": ["hm"] * 8, "rlvr": truth, "control": [Invalid("gone"), *truth[1:]]}
    results = tasks.results(evaluated(tasks, models, before="sft", after="rlvr", control="control"))
    assert set(results.tables) == {"test", "test-greedy", "by-game", "by-verb"}
    kinds = {row["name"]: row["kind"] for row in results.tables["test"]["rows"]}
    assert kinds == {
        "no change": "baseline",
        "sft": "model",
        "rlvr": "model",
        "control": "control",
        "true difference": "ceiling",
    }
    assert results.outcome["rlvr/test/changed"] == 1.0 and results.outcome["sft/test/overall"] == 0.0
    assert results.outcome["rlvr minus control/overall"]["n"] == 7  # a fault of the sampler enters no statistic
    assert results.summary and "rose 0.0 %" in results.summary["headline"]
    assert tasks.results(evaluated(tasks, {"sft": truth})).summary is None


def test_tables_of_pages(folder: Path) -> None:
    tasks = pages(folder)
    truth: list[str | Invalid] = [question.answer for question in tasks.parts(8)["test"]]
    results = tasks.results(evaluated(tasks, {"sft": ["hm"] * 8, "rlvr": truth}, before="sft", after="rlvr"))
    assert set(results.tables) == {"test", "test-greedy"} and results.outcome["rlvr/test/F1"] == 1.0
    assert (
        results.outcome["rlvr minus sft/exact"]["value"] == 1.0
        and results.summary
        and "F1 of changed pages" in results.summary["headline"]
    )


def test_an_evaluation_of_pages_asks_once(folder: Path) -> None:
    tasks = pages(folder)
    twice = [tasks.episode(tasks.of("test")[0], 0, k) for k in range(2)]
    played = tasks.play(Scripted(TOKENIZER, lambda i, turn: ""), twice, tasks.params(8, 1.0), 0)
    with pytest.raises(ConfigError, match="samples"):
        tasks.judgements(twice, played)


def test_games_tell_what_one_of_several_samples_gets_right(folder: Path) -> None:
    """The first sample is always unreadable, the second right on every other row; the first row lost its second."""
    tasks = games(folder)
    parts = tasks.parts(8)
    truth = [question.answer for question in parts["test"]]
    judged = []
    for i, task in enumerate(parts["test"]):
        texts = ["hm", Invalid("gone") if i == 0 else truth[i] if i % 2 else "{}"]
        episodes = [tasks.episode(task, i, k) for k in range(2)]
        first = tasks.play(Scripted(TOKENIZER, lambda *_: "hm"), episodes[:1], tasks.params(4000, 1.0), 0)
        second = tasks.play(Scripted(TOKENIZER, lambda *_, t=texts: t[1]), episodes[1:], tasks.params(4000, 1.0), 0)
        judged.append(tasks.judgements(episodes, [*first, *second]))
    greedy = [[samples[0]] for samples in judged]
    both = {("sft", 0.0, "test"): greedy, ("sft", 1.0, "test"): judged}
    results = tasks.results(Evaluation(["sft"], [0.0, 1.0], 2, parts, both))
    assert set(results.tables) == {"test", "test-greedy", "test-pass2"}
    assert results.outcome["sft/test/overall"] == 0.0 and results.outcome["sft/test/pass@2/overall"] == 4 / 7
    (row,) = (row for row in results.tables["test-pass2"]["rows"] if row["name"] == "sft")
    assert row["cells"][2]["n"] == 7 and "one of 2 samples right" in results.tables["test-pass2"]["title"]


def test_imagined_games_are_a_part_of_an_evaluation(folder: Path) -> None:
    tasks = games(folder, drift_steps=4, drift_episodes=3)
    walks = tasks.parts(8)["drift"]
    perfect, lazy = ([tasks.episode(walk, i, 0) for i, walk in enumerate(walks)] for _ in range(2))
    asked = {}
    for episode in perfect:  # the true game answers what is asked
        ask = episode.walk.question
        episode.walk.question = lambda ask=ask, i=episode.prompt_id: (
            asked.setdefault(i, []).append(ask()) or asked[i][-1]
        )
    tasks.play(
        Scripted(TOKENIZER, lambda i, turn: true_predictor([asked[i][-1]])[0]), perfect, tasks.params(4000, 0.0), 0
    )
    done = tasks.play(Scripted(TOKENIZER, lambda i, turn: "hm"), lazy, tasks.params(4000, 0.0), 0)
    assert all(all(episode.walk.model) and episode.walk.model for episode in perfect)
    hits = tasks.judgements(lazy, done)
    assert [h["model"] for h in hits] == [h["copy"] for h in hits]  # what cannot be read changes nothing
    assert [h["copy"] for h in hits] == [episode.walk.copy for episode in perfect]  # by the same actions
    bare = games(folder, games=[], test=str(folder / "games" / "test"), drift_steps=2)
    with pytest.raises(ConfigError, match=r"env\.drift_steps: needs env\.games to imagine"):
        bare.parts(8)
