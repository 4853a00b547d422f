"""The local sites, by their names in WebArena's task files."""

from __future__ import annotations

from ..http import Request, Response
from .admin import Admin
from .base import Site, image_of
from .forum import Forum
from .places import Places
from .shop import Shop
from .tracker import Tracker

SITES: dict[str, type[Site]] = {kind.key: kind for kind in (Shop, Forum, Admin, Tracker, Places)}
PLACEHOLDERS = {f"__{key.upper()}__": f"http://{key.replace('_', '-')}.test" for key in SITES}


class SiteSet:
    """The five sites of one world, each with a state of its own."""

    def __init__(self, seed: int = 0) -> None:
        self.sites = {key: kind(image_of(kind, seed)) for key, kind in SITES.items()}
        self.by_host = {site.host: site for site in self.sites.values()}

    @property
    def hosts(self) -> frozenset[str]:
        return frozenset(self.by_host)

    def reset(self, seed: int) -> None:
        """Every site as it was built, with the content of a seed."""
        for kind, site in zip(SITES.values(), self.sites.values(), strict=True):
            site.image = image_of(kind, seed)
            site.reset()

    def fetch(self, request: Request) -> Response:
        """The answer of the site that the host names."""
        site = self.by_host.get(request.host)
        return site.handle(request) if site else Response("<html><body>No such site.</body></html>", 404)
