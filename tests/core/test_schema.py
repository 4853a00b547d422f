"""Configuration errors name file, line and the nearest valid key; good files come back whole."""

import re
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar, Literal

import pytest

from terrella.core import schema
from terrella.core.by_path import OwnFile
from terrella.core.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    rate: float = 0.1
    mode: Literal["fast", "slow"] = "fast"

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise ValueError(f"rate: {self.rate} must be above 0")


@dataclass(frozen=True)
class Cat:
    kind: Literal["cat"]
    lives: int = 9


@dataclass(frozen=True)
class Dog:
    kind: Literal["dog"]
    tricks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Outer:
    name: str
    count: int = 1
    limit: int | None = None
    inner: Inner = field(default_factory=Inner)
    pets: list[Cat | Dog] = field(default_factory=list)
    table: dict[str, float] = field(default_factory=dict)
    pair: tuple[float, float] = (0.0, 1.0)


def read(text: str, *overrides: str) -> Outer:
    tree = schema.parse_yaml(text, "f.yaml")
    for override in overrides:
        schema.apply_override(tree, override)
    return schema.build(Outer, tree)


def test_reads_nested_sections_and_kinds() -> None:
    config = read(
        "name: x\nlimit: 3\ninner: {rate: 1e-3}\npets:\n- {kind: dog, tricks: [sit]}\n- {kind: cat}\ntable: {a: "
        "1}\npair: [0.9, 0.95]\n"
    )
    assert config == Outer("x", 1, 3, Inner(0.001), [Dog("dog", ["sit"]), Cat("cat")], {"a": 1.0}, (0.9, 0.95))


def test_an_override_finds_a_list_item_by_number_or_name() -> None:
    text = "stages:\n- {name: warmup, steps: 3}\n- {name: rlvr, steps: 4}\nplain: [1, 2]\n"
    tree = schema.parse_yaml(text, "f.yaml")
    for override in ("stages.rlvr.steps=5", "stages.0.steps=6", "plain.1=7"):
        schema.apply_override(tree, override)
    warmup, rlvr = tree.value["stages"].value
    assert (warmup.value["steps"].value, rlvr.value["steps"].value, tree.value["plain"].value[1].value) == (6, 5, 7)
    for override, message in (
        (
            "stages.rvlr.steps=5",
            "'rvlr' is no name (warmup, rlvr) and no number (0 to 1) of the list at f.yaml:1; did you mean 'rlvr'?",
        ),
        ("stages.2.steps=5", "'2' is no name (warmup, rlvr) and no number (0 to 1) of the list at f.yaml:1"),
        ("plain.x=1", "'x' is no number (0 to 1) of the list at f.yaml:4"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            schema.apply_override(tree, override)


def test_a_stage_of_two_letters_that_were_swapped_is_found() -> None:
    tree = schema.parse_yaml("stages: [{name: sft}, {name: rl}, {name: evaluate}]", "f.yaml")
    with pytest.raises(ConfigError, match=r"'lr' is no name \(sft, rl, evaluate\) .*; did you mean 'rl'\?"):
        schema.apply_override(tree, "stages.lr.steps=5")


def test_an_override_takes_a_named_section_out_of_a_list() -> None:
    text = "stages:\n- {name: warmup, steps: 3}\n- {name: rlvr, steps: 4}\nplain: [1, 2]\nlimit: 3\n"
    tree = schema.parse_yaml(text, "f.yaml")
    for override in ("stages.warmup=null", "stages.rlvr.steps=5", "plain.0=null", "limit=null"):
        schema.apply_override(tree, override)
    assert schema.plain(tree) == {"stages": [{"name": "rlvr", "steps": 5}], "plain": [None, 2], "limit": None}
    with pytest.raises(ConfigError, match=r"'warmup' is no name \(rlvr\) and no number"):
        schema.apply_override(tree, "stages.warmup=null")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\ncuont: 2\n", "f.yaml:2: unknown key 'cuont'; did you mean 'count'?"),
        ("name: x\ninner:\n  rat: 2\n", "f.yaml:3: unknown key 'inner.rat'; did you mean 'rate'?"),
        ("name: x\ncount: two\n", "f.yaml:2: count = 'two' must be int"),
        ("name: x\ncount: true\n", "f.yaml:2: count = True must be int"),
        ("name: x\ninner:\n  rate: 0\n", "f.yaml:3: inner.rate: 0.0 must be above 0"),
        (
            "name: x\ninner: {mode: fsat}\n",
            "f.yaml:2: inner.mode = 'fsat' must be one of 'fast', 'slow'; did you mean 'fast'?",
        ),
        ("count: 1\n", "f.yaml:1: key 'name' is missing"),
        ("name: x\nname: y\n", "f.yaml:2: key 'name' is given twice"),
        ("name: [x\n", "f.yaml:2: not valid YAML"),
        ("name: x\npets:\n- {kind: doog}\n", "f.yaml:3: pets[0].kind = 'doog' is unknown; did you mean 'dog'?"),
        ("name: x\npets:\n- {lives: 3}\n", "f.yaml:3: pets[0] needs a key 'kind': one of cat, dog"),
        ("name: x\npets: 3\n", "f.yaml:2: pets must be a list, not 3"),
        ("- a\n", "f.yaml:1: Outer must be a section with keys"),
    ],
)
def test_errors_name_the_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert message in str(caught.value)


def test_overrides_reach_lists_and_new_sections() -> None:
    config = read("name: x\npets: [{kind: cat}]\n", "pets.0.lives=7", "inner.rate=0.5", "count=4", "limit=null")
    assert (config.pets[0].lives, config.inner.rate, config.count, config.limit) == (7, 0.5, 4, None)
    with pytest.raises(ConfigError, match=r"--set inner\.rat=1: unknown key 'inner\.rat'; did you mean 'rate'"):
        read("name: x\n", "inner.rat=1")
    with pytest.raises(ConfigError, match=r"key\.subkey=value"):
        read("name: x\n", "count")
    with pytest.raises(ConfigError, match="no number"):
        read("name: x\npets: [{kind: cat}]\n", "pets.3.lives=7")


def test_dump_round_trips_and_digest_follows_values() -> None:
    config = read("name: x\npets: [{kind: dog, tricks: [sit]}]\n")
    again = read(schema.dump(config))
    assert again == config and schema.digest(again) == schema.digest(config)
    assert schema.digest(read("name: y\n")) != schema.digest(read("name: x\n"))


def test_missing_file_is_one_clear_error(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        schema.load(Outer, tmp_path / "missing.yaml")


# each line holds the one above twice: sixteen million values in the end
BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrstuvwx"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "aliases written out"),
        ("a: &a [*a]", "aliases written out"),
        ("a: &a {b: *a}", "aliases written out"),
        ("a: " + "[" * 2000 + "]" * 2000, "levels"),
        ("a: " + "{b: " * 90 + "1" + "}" * 90, "levels"),
        ("a: b\0c", "not valid YAML"),
        ('a: "b\\0c"', "null character"),
        ("a: " + "9" * 5000, "5000 characters"),
        ("a: " + "9" * 30, "too large a number"),
        ("a: 2024-13-45", "number or date"),
        ("[1]: 2", "a key must be text"),
        ("a: !!python/object/apply:os.system [true]", "the tag .* is not allowed"),
        ("a: !!timestamp x", "number or date"),
        ("x" * 1_000_001, "characters"),
    ],
)
def test_hostile_yaml_is_named_at_once(text: str, said: str) -> None:
    begun = time.process_time()
    with pytest.raises(ConfigError, match=said):
        schema.parse_yaml(text, "file.yaml")
    assert time.process_time() - begun < 5  # a bomb would take for ever


@pytest.mark.parametrize("text", ["[]", "{b: c}", "3", "null"])
def test_a_kind_that_is_no_text(text: str) -> None:
    with pytest.raises(ConfigError, match=r"f\.yaml:2: pets\[0\]\.kind = .* is unknown"):
        read(f"name: a\npets: [{{kind: {text}}}]")


def test_an_override_below_a_plain_value() -> None:
    for setting in ("name.x=1", "count.y.z=2"):
        with pytest.raises(ConfigError, match="has no parent section"):
            schema.apply_override(schema.parse_yaml("name: a\ncount: 3", "file.yaml"), setting)


@dataclass(frozen=True)
class Lists:
    pair: tuple[float, str] = (0.0, "a")
    many: tuple[float, ...] = ()
    file: OwnFile | None = None


def test_a_pair_has_two_entries_each_of_its_kind() -> None:
    def lists(text: str) -> Lists:
        return schema.build(Lists, schema.parse_yaml(text, "f.yaml"))

    assert lists("pair: [1, b]\nmany: [1, 2, 3]") == Lists((1.0, "b"), (1.0, 2.0, 3.0))
    for text, message in {
        "pair: [1]": "pair = [1] must be a list of 2",
        "pair: [1, b, c]": "pair = [1, 'b', 'c'] must be a list of 2",
        "pair: [b, 1]": "pair[0] = 'b' must be float",
        "many: [1, b]": "many[1] = 'b' must be float",
        "file: [1]": "file = [1] must be str",
    }.items():
        with pytest.raises(ConfigError, match=rf"^f\.yaml:1: {re.escape(message)}$"):
            lists(text)


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "nan", "inf", "-inf", "1e999"])
def test_numbers_are_finite(value: str) -> None:
    for text in (f"inner: {{rate: {value}}}", f"pair: [0.5, {value}]", f"table: {{a: {value}}}"):
        with pytest.raises(ConfigError, match=r"f\.yaml:2: .* must be a finite number"):
            read(f"name: x\n{text}")


def test_numbers_are_not_negative_unless_their_class_says_so() -> None:
    for text, key in (("count: -1", "count"), ("pair: [0.5, -0.5]", "pair"), ("limit: -3", "limit")):
        with pytest.raises(ConfigError, match=rf"f\.yaml:2: {key} = .* must not be negative"):
            read(f"name: x\n{text}")

    @dataclass(frozen=True)
    class Payment:
        penalty: float = -1.0
        signed: ClassVar[tuple[str, ...]] = ("penalty",)

    assert schema.build(Payment, schema.parse_yaml("penalty: -2.5", "f.yaml")) == Payment(-2.5)


def test_a_setting_that_is_gone_is_passed_over_at_the_value_that_says_nothing() -> None:
    @dataclass(frozen=True)
    class Later:
        size: int = 1
        earlier_defaults: ClassVar[dict] = {"world": "language", "video": None}

    later = schema.build(Later, schema.parse_yaml("size: 2\nworld: language\nvideo: null\n", "old.yaml"))
    assert later == Later(2) and schema.differences({"size": 2, "world": "language", "video": None}, later) == []
    assert [key for key, _, _ in schema.differences({"size": 2, "world": "grid"}, later)] == ["world"]
    with pytest.raises(ConfigError, match=r"old\.yaml:2: unknown key 'world'"):
        schema.build(Later, schema.parse_yaml("size: 2\nworld: grid\n", "old.yaml"))


def test_a_run_that_was_begun_with_a_former_default_goes_on() -> None:
    @dataclass(frozen=True)
    class Later:
        mode: str | None = None
        earlier_defaults: ClassVar[dict] = {"mode": "slow"}

    assert schema.build(Later, schema.parse_yaml("mode: slow\n", "own.yaml")) == Later("slow")  # which is still there
    assert schema.differences({"mode": "slow"}, Later()) == schema.differences({"mode": "slow"}, Later("slow")) == []
    assert schema.differences({"mode": "slow"}, Later("fast")) == [("mode", "slow", "fast")]
    assert schema.differences({"mode": "fast"}, Later()) == [("mode", "fast", None)]
