"""Pages under attack in a real Chromium: each ends by the deadline, reaches no port but its own, and is named where
it fails.
"""

from __future__ import annotations

import http.server
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from terrella.rl.worlds.base import WorldFault
from terrella.rl.worlds.web.actions import WebAction
from terrella.rl.worlds.web.backend import ActionFailed, Limits, Start
from terrella.rl.worlds.web.observe import simplified_html

pytestmark = pytest.mark.integration
DEADLINES_S = (4.0, 16.0, 64.0)  # the next where a busy machine was too slow for the one before
FAULT = r"(did not end|failed) within the deadline of \d+ s"
PORT = "is not among the allowed hosts"
REACHES = """for (const f of [
  () => fetch(OTHER + '/fetch'), () => navigator.sendBeacon(OTHER + '/beacon', 'x'), () => new EventSource(OTHER + '/events'),
  () => { new Image().src = OTHER + '/image'; }, () => { const x = new XMLHttpRequest(); x.open('GET', OTHER + '/xhr'); x.send(); },
  () => { const s = document.createElement('script'); s.src = OTHER + '/script'; document.head.append(s); },
  () => { const l = document.createElement('link'); l.rel = 'preload'; l.as = 'fetch'; l.href = OTHER + '/pre'; document.head.append(l); },
  () => { const l = document.createElement('link'); l.rel = 'preconnect'; l.href = OTHER; document.head.append(l); },
  () => new Worker(URL.createObjectURL(new Blob([`importScripts('${OTHER}/worker')`]))),
  () => { const v = document.createElement('video'); v.src = OTHER + '/video'; document.body.append(v); },
  () => fetch('/to-other'), () => { new Image().src = '/to-other'; }, () => new WebSocket(OTHER.replace('http', 'ws') + '/socket'),
]) { try { f(); } catch (e) {} }"""  # noqa: E501


@dataclass(frozen=True)
class Attack:
    """A page, what the agent does on it, and what may come of it: words of the named error; empty for a page that is
    read.
    """

    body: str
    named: str = ""  # with `read`: one or the other, as the machine is busy or not
    actions: tuple[tuple[str, str], ...] = (("click", "Go"),)
    read: str = ""  # what the page must show in the end


def button(script: str) -> str:
    return f'<p>before</p><button onclick="{script}">Go</button>'


ATTACKS = {
    "hang on load": Attack("<p>x</p><script>while (1);</script>", FAULT, ()),
    "hang on click": Attack(button("while (1);"), FAULT),
    "hang in a timer": Attack(button("setTimeout(() => { while (1); }, 1)"), FAULT),
    "hang under the mouse": Attack("<button onmousemove='while (1);'>Go</button>", FAULT, (("hover", "Go"),)),
    "hang on a key": Attack("<input onkeydown='while (1);' value=Go>", FAULT, (("type", "Go"),)),
    "hang in a regular expression": Attack(button("/^(a+)+$/.test('a'.repeat(60) + 'b')"), FAULT),
    "hang when left": Attack("<a href='/fine'>Go</a><script>onbeforeunload = () => { while (1); }</script>", FAULT),
    "hang in a message": Attack(button("postMessage(1)") + "<script>onmessage = () => { while (1); }</script>", FAULT),
    "synchronous request without an answer": Attack(
        button("const x = new XMLHttpRequest(); x.open('GET', '/silent', false); x.send()"), FAULT
    ),
    "alerts without end": Attack("<p>x</p><script>while (1) alert(1);</script>", FAULT + "|did not open", ()),
    "alert, confirm, prompt": Attack(
        button("alert(1); this.textContent = [confirm('?'), prompt('?')].join()"), read="false,"
    ),
    "beforeunload dialog": Attack(
        ("<a href='/fine'>Go</a><script>onbeforeunload = e => { e.preventDefault(); return 'stay'; "
"}</script>"), read="fine|Go"
    ),
    "print": Attack(button("print(); this.textContent = 'printed'"), read="printed"),
    "window.open": Attack(button("window.open('/fine')"), read="fine"),
    "sixty windows": Attack(button("for (let i = 0; i < 60; i++) window.open('/fine')"), FAULT, read="fine|before"),
    "window.open to another port": Attack(button("window.open(OTHER + '/window')"), PORT, read="before"),
    "window.close": Attack(button("window.close()"), read="before"),
    "a window that closes itself": Attack(button("const w = window.open('/fine'); setTimeout(() => w.close(), "
"300)"), read="before|fine"),
    "download": Attack("<a href='/download'>Go</a>", read="Go"),
    "thirty redirects": Attack("<a href='/chain/30'>Go</a>", "chrome-error|redirects"),
    "redirect to another port": Attack("<a href='/to-other'>Go</a>", PORT),
    "location of another port": Attack(button("location = OTHER + '/location'"), PORT),
    "form to another port": Attack(
        "<form method=post action='OTHER/form'><button>Go</button></form>", PORT
    ),
    "link to another port": Attack("<a href='OTHER/link'>Go</a>", PORT),
    "meta refresh to another port": Attack(
        "<meta http-equiv=refresh content='0; url=OTHER/refresh'><p>x</p>", f"led to .* {PORT}|led to a page", ()
    ),
    "meta refresh to itself": Attack("<meta http-equiv=refresh content=0><p>again</p>", FAULT, (), read="again"),
    "iframe of another port": Attack("<iframe src='OTHER/frame'></iframe><p>framed</p>", actions=(), read="framed"),
    ("thirteen other ways to another "
"port"): Attack(f"<p>ways</p><script>{REACHES}</script>", actions=(("wait", ""),), read="ways"),
    "WebRTC to another port": Attack(
        "<p>rtc</p><script>const p = new RTCPeerConnection({iceServers: [{urls: 'stun:127.0.0.1:UDP'}]});"
        "p.createDataChannel('x'); p.createOffer().then(o => "
"p.setLocalDescription(o));</script>", actions=(("wait", ""),), read="rtc"
    ),
    "service worker": Attack(
        "<p id=p>?</p><script>navigator.serviceWorker.register('/worker.js').then(() => p.textContent = 'registered', "
        "() => p.textContent = 'no worker')</script>", actions=(("wait", ""),), read="registered|no worker"
    ),
    "huge document": Attack(
        "<script>document.write('<p>some <a href=/a>link</a></p>'.repeat(60000))</script>", FAULT, (), read="link"
    ),
    "endless growth": Attack(
        (
            "<p>top</p><script>setInterval(() => { for (let i = 0; i < 50; i++) document.body.append('more ') }, "
            "5)</script>"
        ),
        FAULT, (("scroll_down", ""), ("scroll_down", "")), "top|more",
    ),
    "history flood": Attack(
        button("for (let i = 0; i < 300; i++) history.pushState(0, '', '/fine?' + "
"i)"), FAULT, (("click", "Go"), ("back", "")), "before"
    ),
    "chrome://crash": Attack(
        "<a href='chrome://crash'>Go</a>", PORT, (("click", "Go"), ("goto", "chrome://crash"))
    ),
    "memory": Attack(button("const a = []; while (1) a.push(new Array(1e6).fill(1.5))"), f"crashed|{FAULT}"),
    "broken built-ins": Attack(
        ("<p>x</p><script>JSON.stringify = () => '{'; Array.prototype.map = 0; Promise.prototype.then = "
"null</script>"), FAULT, ()
    ),
    "emptied document": Attack(button("document.open()"), FAULT),
    "no document": Attack(button("document.documentElement.remove()"), FAULT),
}  # fmt: skip


class Pages(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.seen.append(self.path)  # type: ignore[attr-defined]
        status, headers, body = self.server.answer(self.path)  # type: ignore[attr-defined]
        self.send_response(status)
        for name, value in {"Content-Type": "text/html", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve(answer) -> http.server.ThreadingHTTPServer:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.daemon_threads, server.seen, server.answer = True, [], answer  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class Place:
    """The pages, a second port that nothing may reach, and one browser for all attacks."""

    def __init__(self) -> None:
        from terrella.rl.worlds.web.chromium import ChromiumBackend

        self.other = serve(lambda path: (200, {}, b"<p>stolen</p>"))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.udp.settimeout(0)
        self.pages = serve(self.answer)
        self.address = f"127.0.0.1:{self.pages.server_port}"
        self.backend = ChromiumBackend(Limits(hosts=frozenset({self.address}), deadline_s=DEADLINES_S[0]))

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        other = f"http://127.0.0.1:{self.other.server_port}"
        if path.startswith("/attack/"):
            body = list(ATTACKS.values())[int(path.removeprefix("/attack/"))].body
            body = f"<script>const OTHER = '{other}';</script>" + body.replace("'OTHER/", f"'{other}/").replace(
                "=OTHER/", f"={other}/"
            )
            return 200, {}, body.replace("UDP", str(self.udp.getsockname()[1])).encode()
        if path.startswith("/chain/"):
            left = int(path.removeprefix("/chain/"))
            return (302, {"Location": f"/chain/{left - 1}"}, b"") if left else (200, {}, b"<p>fine</p>")
        if path == "/to-other":
            return 302, {"Location": f"{other}/redirected"}, b""
        if path == "/download":
            return 200, {"Content-Disposition": "attachment; filename=x.bin"}, b"x"
        if path == "/worker.js":
            return 200, {"Content-Type": "text/javascript"}, b"while (1);"
        if path == "/silent":
            time.sleep(60)
        return 200, {}, b"<p>fine</p>"

    def begin(self, path: str) -> None:
        self.backend.begin(Start((f"http://{self.address}{path}",)))

    def play(self, name: str) -> tuple[str, str]:
        """(what was read, named error) of an attack."""
        attack, text, errors = ATTACKS[name], "", []
        try:
            self.begin(f"/attack/{list(ATTACKS).index(name)}")
            text = simplified_html(self.look())
            for kind, word in attack.actions:
                try:
                    self.act(kind, word)
                except ActionFailed as error:
                    errors.append(str(error))
                text = simplified_html(self.look())
            self.timed(self.backend.html)
        except (WorldFault, ActionFailed) as error:
            errors.append(str(error))
        return text, "; ".join(errors)

    def look(self):
        return self.timed(self.backend.look)

    def act(self, kind: str, word: str) -> None:
        labels = self.look().labels.values()
        element = next((e for e in labels if word and word in (e.text, e.attributes.get("value"))), None)
        self.timed(self.backend.act, WebAction(kind, 0, word), element)

    def timed(self, call, *args):
        begun = time.monotonic()
        try:
            return call(*args)
        finally:
            self.slowest = max(getattr(self, "slowest", 0.0), time.monotonic() - begun)

    def close(self) -> None:
        self.backend.close()
        for server in (self.pages, self.other):
            server.shutdown()
            server.server_close()
        self.udp.close()


@pytest.fixture(scope="module")
def place():
    for name, there in {
        "chromium": shutil.which("chromium"),
        "playwright": importlib.util.find_spec("playwright"),
    }.items():
        if not there:
            required = "chromium" in os.environ.get("TERRELLA_REQUIRE", "").split(",")
            (pytest.fail if required else pytest.skip)(f"{name} is not installed")
    made = Place()
    yield made
    made.close()


def attack(place: Place, name: str) -> str:
    """Play an attack; what came of it: harmless, refused (an action), or fault (an episode)."""
    for deadline_s in DEADLINES_S:
        place.backend.limits = replace(place.backend.limits, deadline_s=deadline_s)
        outcome, late = attempt(place, name)
        if not late:
            return outcome
        print(late)
    pytest.fail(late)


def attempt(place: Place, name: str) -> tuple[str, str]:
    """(what came of it, what was not there at the deadline: how fast a page is says more of the machine than of the
    page).
    """
    aim, browser, place.slowest = ATTACKS[name], place.backend.process.pid, 0.0
    text, error = place.play(name)
    most = 2 * place.backend.limits.deadline_s + 12.0  # the browser is killed at twice the deadline; and a busy machine
    assert place.slowest < most, f"{name}: a call took {place.slowest:.1f} s"
    assert place.other.seen == [], f"{name}: the page reached another port: {place.other.seen}"
    with pytest.raises(BlockingIOError):
        place.udp.recv(2048)
    shown = re.sub(r"<[^>]*>", "", text)
    named, read = (
        error and aim.named and re.search(aim.named, error),
        not error and aim.read and re.search(aim.read, shown),
    )
    if not (named or read):
        assert re.search(FAULT, error), f"{name}: {error!r} {shown[:300]!r}"
        return "", f"{name}: {error}"
    assert "/worker.js" not in place.pages.seen
    try:
        place.begin("/fine")
        assert "fine" in simplified_html(place.look())
    except WorldFault as fault:
        assert re.search(FAULT, str(fault)), f"{name}: the next page: {fault}"
        return "", f"{name}: the next page: {fault}"
    if place.backend.process.pid != browser:
        assert re.search(FAULT, error), f"{name}: the browser did not survive"
        return "", f"{name}: the browser did not survive"
    return "harmless" if not error else "fault" if error.startswith("web:") else "refused", ""


SAMPLE = ("hang on click", "redirect to another port", ("thirteen other ways to another "
"port"), "alert, confirm, prompt", "window.open",
          "window.open to another port", "download", "print")  # fmt: skip


@pytest.mark.parametrize("name", SAMPLE)
def test_a_page(place: Place, name: str) -> None:
    attack(place, name)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in SAMPLE])
def test_all_pages(place: Place, name: str) -> None:
    attack(place, name)


def test_the_sandbox_is_on_except_where_it_cannot_be(place: Place) -> None:
    from terrella.rl.worlds.web.browser import _unsandboxed

    off = b"--no-sandbox" in Path(f"/proc/{place.backend.process.pid}/cmdline").read_bytes()
    assert off == bool(_unsandboxed)  # as root, or without user namespaces, with the reason in the log
    if os.geteuid() != 0:
        return
    assert "user root" in next(iter(_unsandboxed.values()))
    system = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if system is None or f"{sys.version_info[0]}.{sys.version_info[1]}" not in str(Path(system).resolve()):
        pytest.skip("no Python of this version that another user may run")
    code = (
        "from terrella.rl.worlds.web.browser import _unsandboxed\n"
        "from terrella.rl.worlds.web.chromium import ChromiumBackend\n"
        "from terrella.rl.worlds.web.backend import Limits, Start\n"
        "backend = ChromiumBackend(Limits(deadline_s=60)); backend.begin(Start(('about:blank',)))\n"
        "print('--no-sandbox' in open(f'/proc/{backend.process.pid}/cmdline').read(), _unsandboxed); backend.close()"
    )
    # not pytest's, which other users cannot enter
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        Path(home).chmod(0o777)
        bare = {"PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "PYTHONPATH": ":".join(filter(None, sys.path))}
        other = {"user": 65534, "group": 65534, "extra_groups": ()}
        try:
            told = subprocess.run(
                [system, "-c", code], capture_output=True, text=True, timeout=240, cwd="/", env=bare, **other
            )
        except PermissionError:
            pytest.skip("this process may not start one of another user")
    if "Permission denied" in told.stderr or "No module named" in told.stderr:
        pytest.skip("another user may not read the package")
    assert told.stdout.startswith("False {}") or "user namespaces" in told.stdout, told.stdout + told.stderr[-2000:]
