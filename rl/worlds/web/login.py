"""Logging in before an episode: by a saved storage state, or by filling a login form in. Credentials come from the
environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base import WorldFault
from .actions import WebAction
from .backend import ActionFailed, Backend
from .elements import Element


@dataclass(frozen=True)
class LoginForm:
    """A login page and the names of its fields; the two variables of the environment hold who logs in."""

    url: str
    user_field: str = "username"
    password_field: str = "password"
    user_variable: str = ""
    password_variable: str = ""


def read_state(path: str | Path) -> tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]:
    """The cookies and the local storage of a Playwright storage state."""
    try:
        held = json.loads(Path(path).read_text(encoding="utf-8"))
        return tuple(held["cookies"]), tuple(held.get("origins", ()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WorldFault(
            f"web: cannot read the storage state {path}: set auth_folder, or give its sites a login form ({error})"
        ) from error


def credentials(form: LoginForm) -> tuple[str, str]:
    """Who logs in; a missing variable is named."""
    for name in (form.user_variable, form.password_variable):
        if not os.environ.get(name):
            raise WorldFault(
                f"web: the environment variable {name or '(none is named)'} for the login at {form.url} is not set"
            )
    return os.environ[form.user_variable], os.environ[form.password_variable]


def fill_in(backend: Backend, form: LoginForm, user: str, password: str) -> None:
    """Log in through the form; the page must go elsewhere afterwards."""
    try:
        backend.open(form.url)
        for name, text in ((form.user_field, user), (form.password_field, password)):
            field = _named(backend.look().labels, name, form.url)
            backend.act(WebAction("type", field.label, text), field)
        backend.act(WebAction("press", text="Enter"), None)
        if any(_is_named(e, form.password_field) for e in backend.look().labels.values()):
            raise WorldFault(f"web: the login at {form.url} was refused")
    except ActionFailed as error:
        raise WorldFault(f"web: the login at {form.url} failed: {error}") from error


def _named(labels: Mapping[int, Element], name: str, url: str) -> Element:
    found = next((e for e in labels.values() if _is_named(e, name)), None)
    if found is None:
        raise WorldFault(f"web: {url} has no field {name!r}; set user_field and password_field")
    return found


def _is_named(element: Element, name: str) -> bool:
    return element.attributes.get("name") == name


def redact(text: str, secrets: tuple[str, ...]) -> str:
    """A text without the credentials that were used."""
    for secret in secrets:
        if len(secret) > 3:
            text = text.replace(secret, "********")
    return text
