"""The pages that are made from the code are up to date."""

from pathlib import Path

from terrella.launch import reference

DOCS = Path(reference.__file__).parent.parent / "docs"


def test_the_configuration_page_is_up_to_date() -> None:
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert page == reference.render(), "run: python -m terrella.launch.reference > docs/configuration.md"


def test_the_page_of_the_python_interface_is_up_to_date() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    assert page == reference.render_api(), "run: python -m terrella.launch.reference api > docs/api.md"


def test_every_key_has_a_meaning() -> None:
    unexplained = [line for line in reference.render().splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert unexplained == [], "write a comment beside the field, or an entry in SHARED of launch/reference.py"
