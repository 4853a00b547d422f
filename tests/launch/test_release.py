"""The release workflow: a tag that is not the version, or has no section in the changelog, uploads nothing."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
JOBS = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))["jobs"]


@pytest.mark.parametrize(
    ("tag", "section", "said"),
    [
        ("v1.2.3", "## 1.2.3 (2030-01-01)", ""),
        ("v1.2.4", "## 1.2.4 (2030-01-01)", "__version__ is 1.2.3"),
        ("v1.2.3", "## 1.2", "CHANGELOG.md"),
    ],
)
def test_the_tag_is_checked(tag: str, section: str, said: str, tmp_path: Path) -> None:
    (check,) = (step["run"] for step in JOBS["build"]["steps"] if step.get("name", "").startswith("the tag"))
    (tmp_path / "__init__.py").write_text('"""A package."""\n\n__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{section}\n")
    environment = os.environ | {"GITHUB_REF_NAME": tag}
    done = subprocess.run(
        ["bash", "-e", "-c", check], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode == 0) == (said == "") and said in done.stdout, done.stdout + done.stderr


def test_the_check_reads_the_real_version() -> None:
    import terrella

    (line,) = (line for line in (ROOT / "__init__.py").read_text().splitlines() if line.startswith("__version__ = "))
    assert line == f'__version__ = "{terrella.__version__}"'


def test_only_the_upload_may_sign_in_and_it_waits_for_the_build() -> None:
    assert JOBS["upload"]["needs"] == "build" and JOBS["upload"]["permissions"] == {"id-token": "write"}
    assert "permissions" not in JOBS["build"]
