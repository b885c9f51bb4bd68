"""The page of a run while it trains: only on this machine, only the page, and the news when there are any."""

import html
import http.client
import json
import os
import shutil
import signal
import socket
import threading
import webbrowser
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ellzero.cli import main
from ellzero.experiments.store.folder import Folder
from ellzero.page import serve as module
from ellzero.page.serve import Server
from support.browser import Browser
from support.pages import small_run


@pytest.fixture(scope="module")
def finished() -> Path:
    return small_run()


@pytest.fixture
def begun(finished: Path, tmp_path: Path) -> Path:
    """The same run after its first epoch, before its first checkpoint."""
    home = tmp_path / "begun"
    home.mkdir()
    shutil.copy(finished / "run.json", home)
    (home / "history.jsonl").write_text((finished / "history.jsonl").read_text().splitlines(True)[0])
    return home


@pytest.fixture
def server(begun: Path) -> Iterator[Server]:
    made = Server(Folder.open(begun))
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join(60)


def ask(server: Server, path: str, method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", f"127.0.0.1:{server.server_address[1]}" if host is None else host)
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), text


@pytest.mark.slow
def test_news_come_when_the_history_grows(server: Server, begun: Path, finished: Path) -> None:
    status, headers, page = ask(server, "/")
    assert status == 200
    assert page.startswith("<!DOCTYPE html>")
    assert "connect-src 'self'" in html.unescape(page)
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    since = f"/content?since={headers['X-Version']}"
    assert ask(server, since)[::2] == (204, "")
    lines = (finished / "history.jsonl").read_text().splitlines(True)
    (begun / "history.jsonl").write_text("".join(lines[:2]) + '{"torn')
    status, headers, content = ask(server, since)
    assert status == 200
    assert "Not finished: 2 of 4 epochs so far" in content
    assert "<html" not in content
    errors = [json.loads(line)["error"] for line in lines[:2]]
    assert json.dumps(errors)[1:-1] in content
    assert 'data-chart="network"' not in content
    shutil.copytree(finished / "checkpoints", begun / "checkpoints")
    status, headers, content = ask(server, f"/content?since={headers['X-Version']}")
    assert status == 200
    assert 'data-chart="network"' in content
    shutil.copy(finished / "results.json", begun)
    (begun / "history.jsonl").write_text("".join(lines))
    assert "Finished: 4 epochs." in ask(server, f"/content?since={headers['X-Version']}")[2]


@pytest.mark.slow
def test_the_network_is_read_once_for_each_checkpoint(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    real = module.look_at
    monkeypatch.setattr(module, "look_at", lambda *args: looks.append(1) or real(*args))
    with Server(Folder.open(finished)) as made:
        made.page()
        made.page(part=True)
        made.page(part=True)
    assert len(looks) == 1


@pytest.mark.slow
def test_a_page_is_made_once_for_all_who_ask(server: Server, begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = module.run_page
    monkeypatch.setattr(module, "run_page", lambda *args, **rest: made.append(1) or real(*args, **rest))
    with ThreadPoolExecutor(40) as readers:
        answers = list(readers.map(lambda _: ask(server, "/"), range(40)))
    assert len(made) == 1
    assert len({text for _, _, text in answers}) == 1
    with (begun / "history.jsonl").open("a") as file:
        file.write("\n")
    ask(server, "/")
    assert len(made) == 2


@pytest.mark.slow
def test_who_says_nothing_is_hung_up_on(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Handler, "timeout", 0.5)
    address = server.server_address
    silent = [socket.create_connection(("127.0.0.1", int(address[1])), timeout=60) for _ in range(150)]
    assert ask(server, "/none")[0] == 404  # few bytes: a long page, read slowly by a busy machine, would be cut off too
    for connection in silent:
        assert connection.recv(1) == b""
        connection.close()


def test_no_other_page_may_frame_it(server: Server) -> None:
    for path, method in (("/", "GET"), ("/none", "GET"), ("/", "POST")):
        headers = ask(server, path, method)[1]
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
        assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ["/run.json", "/history.jsonl", "/..", "/../", "/checkpoints/", "/favicon.ico"])
def test_nothing_else_is_there(server: Server, path: str) -> None:
    status, _, text = ask(server, path)
    assert (status, text) == (404, "There is nothing here.\n")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1"])
def test_a_page_from_elsewhere_gets_nothing(server: Server, host: str) -> None:
    status, _, text = ask(server, "/", host=host)
    assert (status, text) == (403, "This server answers on its own address only.\n")


def test_it_can_only_be_read(server: Server) -> None:
    assert ask(server, "/", "HEAD")[::2] == (200, "")
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, "/", method)[0] == 501
    assert ask(server, "/", host=f"localhost:{server.server_address[1]}")[0] == 200


def test_it_listens_on_loopback_alone(server: Server) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert server.address == f"http://127.0.0.1:{server.server_address[1]}/"


def test_damage_is_told_in_the_page(server: Server, begun: Path) -> None:
    (begun / "history.jsonl").write_text("<b>\n" + (begun / "history.jsonl").read_text())
    status, _, content = ask(server, "/content")
    assert status == 200
    assert "is damaged: line 1 of 2 is no record" in content
    assert "<b>" not in content


def test_a_port_that_is_taken_and_a_run_that_is_not_there(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            Server(Folder.open(begun), port=port)
        assert main(["report", str(begun), "--serve", "--port", str(port)]) == 1
        said = capsys.readouterr().err
        assert "Address already in use" in said
        assert said.count("\n") == 1
    with pytest.raises(IndexError, match="`index` must be from 0 to 0, got 1"):
        Server(Folder.open(begun), 1)


def test_ctrl_c_ends_it_well(begun: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: what `--open` opens looks at the page, and presses Ctrl-C."""
    seen: list[tuple[str, int]] = []
    made: list[int] = []
    real = module.run_page
    monkeypatch.setattr(module, "run_page", lambda *args, **rest: made.append(1) or real(*args, **rest))

    def look(address: str) -> None:
        assert made == [1]  # it is there before anybody can ask
        connection = http.client.HTTPConnection(address.split("/")[2], timeout=60)
        connection.request("GET", "/")
        seen.append((address, connection.getresponse().status))
        connection.close()
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(webbrowser, "open", lambda address: threading.Thread(target=look, args=(address,)).start())
    assert main(["report", "--serve", str(begun), "--open"]) == 0
    ((address, status),) = seen
    assert status == 200
    assert made == [1]
    out, err = capsys.readouterr()
    assert out.startswith(f"{address} shows {begun}")
    assert err == ""


@pytest.mark.slow
def test_the_browser_follows_the_run(server: Server, begun: Path, finished: Path, chromium: Browser) -> None:
    errors = [json.loads(line)["error"] for line in (finished / "history.jsonl").read_text().splitlines()]
    tab = chromium.open(server.address, 390, touch=True)
    tab.ready()
    points = "document.getElementById('error').data[0].x.length"
    tab.wait(f"{points} === 1")
    tab.evaluate("document.getElementById('error').same = 'yes'; document.getElementById('recipe').open = true")
    tab.evaluate("window.scrollTo(0, 300)")
    for name in ("history.jsonl", "results.json"):
        shutil.copy(finished / name, begun)
    shutil.copytree(finished / "checkpoints", begun / "checkpoints")
    tab.wait(f"{points} === {len(errors)} && !!document.getElementById('network')")
    tab.ready()
    assert tab.evaluate("document.getElementById('state').textContent") == "Finished: 4 epochs."
    assert tab.evaluate("Array.from(document.getElementById('error').data[0].y)") == errors
    # The chart is the same one, and what the reader had opened and scrolled to stays.
    assert tab.evaluate("document.getElementById('error').same") == "yes"
    assert tab.evaluate("document.getElementById('recipe').open") is True
    assert tab.evaluate("window.scrollY") == 300
    # A finger on a chart scrolls the page.
    tab.evaluate("document.getElementById('error').scrollIntoView({block: 'center'})")
    before = tab.evaluate("window.scrollY")
    tab.ask("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": 200, "y": 450}])
    for y in range(430, 230, -20):
        tab.ask("Input.dispatchTouchEvent", type="touchMove", touchPoints=[{"x": 200, "y": y}])
    tab.ask("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    tab.wait(f"window.scrollY > {before + 50}")
    assert tab.problems == []
    assert all(url.startswith((server.address, "data:")) for url in tab.requests)
    tab.close()
