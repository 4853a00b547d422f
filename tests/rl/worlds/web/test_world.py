"""The web World: how episodes end, what is counted, logins, credentials nowhere."""

import json

import pytest

from terrella.rl.worlds.base import WorldFault
from terrella.rl.worlds.web.login import LoginForm, credentials, read_state, redact
from terrella.rl.worlds.web.sites.base import PASSWORD
from terrella.rl.worlds.web.world import WebWorld


def finished(seed: int, **settings) -> WebWorld:
    world = WebWorld(**settings)
    world.reset(seed)
    while not world.done:
        world.step(world.demonstrate())
    return world


def test_an_episode_ends_by_exit_or_by_a_limit() -> None:
    world = WebWorld()
    world.reset(0)
    for n in range(5):
        result = world.step(f"no action {n}")
        assert result.info["parse_failed"] and not result.info["action_is_valid"]
    assert result.done and result.info["early_stop"] and world.answer.startswith("Early stop") and result.reward == 0
    with pytest.raises(WorldFault, match="over"):
        world.step("exit()")
    world.reset(0)
    results = [world.step('do(action="Scroll Down")') for _ in range(5)]
    assert [r.done for r in results] == [False] * 4 + [True] and not results[0].info["action_is_effective"]
    world = WebWorld(max_steps=3)
    world.reset(0)
    assert [world.step(f'do(action="Hover", element="{n}")').done for n in range(3)] == [False, False, True]


def test_an_early_stop_is_no_right_answer() -> None:
    world = WebWorld(sites=("reddit",), split="all")
    asked = [t for t in world.tasks if dict(t.task.evaluation.answers) == {"must_include": ["5"]}]
    assert len(asked) == 6
    for task in asked:
        world.open_task(task.task)
        results = [world.step('do(action="Scroll Down")') for _ in range(5)]
        assert results[-1].info["early_stop"] and results[-1].reward == 0.0, world.answer


@pytest.mark.parametrize(
    ("template", "actions"),
    [
        (106, ["new_tab", "stop []"]),  # judged by the shop in front, where there is none
        (101, ["goto [http://[abc]", "stop []"]),
        (307, ["goto [http://shopping-admin.test/report?from=\u00b2&to=1]", "stop []"]),
        (307, [f"goto [http://shopping-admin.test/report?from={10**20}&to=1]", "stop []"]),
    ],
)
def test_odd_actions_score_zero_and_are_no_fault(template: int, actions: list[str]) -> None:
    world = WebWorld(observation="accessibility", split="all")
    world.reset(next(s for s, t in enumerate(world.tasks) if t.task.template_id == template))
    results = [world.step(f"```{action}```") for action in actions]
    assert results[-1].done and results[-1].reward == 0.0


def test_an_element_that_is_not_there_is_a_failed_action_and_no_fault() -> None:
    world = WebWorld()
    world.reset(1)
    result = world.step('do(action="Click", element="900")')
    assert (
        not result.info["action_is_valid"]
        and not result.info["parse_failed"]
        and "no element 900" in world.error
        and not result.done
    )


def test_the_accessibility_observation_is_acted_on_by_its_own_ids() -> None:
    world = WebWorld(observation="accessibility", sites=("map",), split="all")
    world.reset(next(s for s, t in enumerate(world.tasks) if t.task.template_id == 507))
    name = world.task.intent.removeprefix("Open the page of ").rstrip(".")
    field = next(n for n, e in world.elements.items() if e.tag == "input")
    assert f"[{field}] textbox 'Find a place'" in world.observation
    world.step(f"```type [{field}] [{name}] [1]```")
    link = next(n for n, e in world.elements.items() if e.tag == "a" and e.text == name)
    world.step(f"I click. ```click [{link}]```")
    assert world.step("```stop []```").reward == 1.0


def test_a_task_of_the_callers_is_opened_and_restored() -> None:
    world, twin = WebWorld(), WebWorld()
    record = dict(world.tasks[3].task.raw)
    text = world.open_task(record)
    assert text.startswith(record["intent"])
    world.step('do(action="Click", element="1")')
    saved = json.loads(json.dumps(world.snapshot()))
    twin.restore(saved)
    assert twin.render() == world.render() and twin.snapshot() == saved


def test_login_by_form_leaves_no_password_anywhere() -> None:
    world = finished(2, login="form", sites=("shopping", "map"), split="all")
    assert world.score == 1.0 and world.backend.cookies["shopping.test"]["session"]  # type: ignore[union-attr]
    two = WebWorld(login="form", split="all")
    two.reset(next(s for s, t in enumerate(two.tasks) if t.task.template_id == 601))
    assert len(two.backend.tabs) == 2 and two.backend.front == 0  # type: ignore[union-attr]
    world.reset(0)
    field = next((n for n, e in world.page.labels.items() if e.tag == "input"), None)
    world.step(f'do(action="Type", argument="{PASSWORD}", element="{field}")')
    held = "".join(world.render(mode) for mode in world.render_modes)
    assert PASSWORD not in held and "********" in held and "session" not in held


def test_an_episode_never_begins_without_the_login_that_its_task_names(tmp_path) -> None:
    record = dict(next(t.task.raw for t in WebWorld(sites=("reddit",)).tasks))
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps([record]))
    logins = {"gitlab": LoginForm("http://gitlab.test/login")}
    world = WebWorld(source="file", backend="chromium", tasks_file=str(file), logins=logins)
    with pytest.raises(WorldFault, match=r"reddit_state.json: set auth_folder, or give its sites a login form"):
        world._identity(world.tasks[0].task)


def test_logging_in_again_keeps_a_password_once_and_names_the_task_that_cannot_start() -> None:
    world = WebWorld(login="form", sites=("reddit",))
    for seed in range(3):
        world.reset(seed)
    assert world.secrets == (PASSWORD,)
    with pytest.raises(WorldFault, match=r"the start of task other: .*elsewhere"):
        world.open_task({**dict(world.tasks[0].task.raw), "task_id": "other", "start_url": "http://elsewhere.test/"})


def test_states_and_credentials_come_from_files_and_the_environment(tmp_path, monkeypatch) -> None:
    file = tmp_path / "reddit_state.json"
    file.write_text(
        json.dumps({"cookies": [{"name": "a", "value": "b", "domain": "x.test", "path": "/"}], "origins": []})
    )
    assert read_state(file)[0][0]["name"] == "a"
    with pytest.raises(WorldFault, match="auth_folder"):
        read_state(tmp_path / "none.json")
    form = LoginForm("http://x.test/login", user_variable="SITE_USER", password_variable="SITE_PASSWORD")
    with pytest.raises(WorldFault, match="SITE_USER"):
        credentials(form)
    monkeypatch.setenv("SITE_USER", "sam")
    monkeypatch.setenv("SITE_PASSWORD", "long-secret")
    assert credentials(form) == ("sam", "long-secret")
    assert redact("my long-secret word", ("long-secret",)) == "my ******** word"
