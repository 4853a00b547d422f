"""docs/configuration.md is what the dataclasses say."""

from pathlib import Path

from terrella.launch import reference


def test_the_page_is_up_to_date() -> None:
    page = Path(reference.__file__).parent.parent / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == reference.render(), "run: python -m terrella.launch.reference > docs/configuration.md"


def test_every_key_has_a_meaning() -> None:
    assert reference.without_meaning() == [], "write a comment beside the field, or an entry in SHARED of launch/reference.py"
