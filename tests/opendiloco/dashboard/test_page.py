"""The page in a real browser: what it shows, that hostile names stay text, and that nothing is asked for elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from opendiloco.dashboard import watching
from opendiloco.dashboard.server import bind, dashboard, url_of
from opendiloco.dashboard.watching import Source
from tests.opendiloco.dashboard.browser import CHROMIUM, Page, browser, new_page
from tests.opendiloco.dashboard.invented import HOSTILE, Story, invented_run

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, of Debian's package chromium"),
]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(watching, "WATCHED_SECONDS", 0.05)
    monkeypatch.setattr(watching, "UNWATCHED_SECONDS", 0.2)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with browser(tmp_path_factory.mktemp("profile")) as port:
        yield port


def looking(port: int, sources: list[Source], look: Callable[[Page, str], Awaitable[None]], width: int = 1280) -> None:
    """Open the page in a browser, look at it, and see that nothing went wrong and nothing was asked for elsewhere."""

    async def scenario() -> None:
        listening = bind(("127.0.0.1", 0))
        async with dashboard(listening, lambda: sources), new_page(port) as page:
            url = url_of(listening)
            await page.open(url, width)
            await look(page, url)
            assert page.errors == []
            assert [request for request in page.requests if not request.startswith(url)] == []
            assert await page.evaluate("window.broken") is None, "what a peer says was run"

    asyncio.run(scenario())


def test_a_run_is_shown_and_goes_on_live_and_what_peers_say_stays_text(port: int) -> None:
    story = Story(12)

    async def look(page: Page, url: str) -> None:
        await page.until("document.querySelectorAll('#peers-rows tr').length === 4")
        assert await page.evaluate("document.querySelector('.trouble').textContent") == (
            f"Its work does not count: {HOSTILE}"
        )
        assert await page.evaluate("document.querySelectorAll('main script, main img').length") == 0
        assert await page.evaluate("document.querySelector('.me').textContent") == "this machine"
        assert await page.evaluate("document.querySelector('#run-name').textContent") == "tiny"
        await page.until("document.querySelector('#figures').innerText.includes('12 of 40')")
        assert await page.evaluate("document.querySelectorAll('#board li').length") == 4
        assert await page.evaluate("document.querySelector('#teams').textContent.includes('<b>team</b> 1 (2 peers)')")
        assert await page.evaluate("document.querySelectorAll('#log-rows tr').length") == 12
        story.step()
        await page.until("document.title.startsWith('13/40')")
        await page.until("document.querySelector('#log-rows td').textContent === '12'")
        await page.until("document.querySelectorAll('#loss-chart circle').length >= 1")
        assert await page.evaluate("document.querySelector('#connection').textContent") == "live"

    looking(port, [story.source], look)


def test_rounds_are_read_with_the_keyboard(port: int) -> None:
    async def look(page: Page, url: str) -> None:
        await page.until("document.querySelectorAll('#timeline button').length === 14")
        await page.evaluate("document.querySelector('#timeline [aria-pressed=true]').focus()")
        for _ in range(4):
            await page.press("ArrowLeft")
        await page.until("document.querySelector('#round-detail').innerText.includes('Outer step 10')")
        said = await page.evaluate("document.querySelector('#round-detail').innerText")
        assert "was absent from most chunks" in said
        assert await page.evaluate("document.activeElement.className.trim().startsWith('bad')")
        for _ in range(4):
            await page.press("ArrowLeft")
        await page.until("document.querySelector('#round-detail').innerText.includes('Outer step 6')")
        assert "from outer step 7 on: outer learning rate 0.5 instead of 0.7, outer momentum 0.8 instead of 0.6" in (
            await page.evaluate("document.querySelector('#round-detail').innerText")
        )
        assert "In force: amendment 1 (outer learning rate 0.5, outer momentum 0.8)" in await page.evaluate(
            "document.querySelector('#alerts').innerText"
        )
        await page.press("End")
        await page.until("document.querySelector('#round-detail').innerText.includes('Outer step 14')")

    looking(port, [Story(14).source], look)


def test_nothing_is_wider_than_a_phone_and_everything_can_be_read_in_the_dark(port: int) -> None:
    async def look(page: Page, url: str) -> None:
        await page.until("document.querySelectorAll('#peers-rows tr').length === 4")
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        light = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        await page.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        await page.until(f"getComputedStyle(document.body).backgroundColor !== '{light}'")

    looking(port, [Story(14).source], look, width=390)


def test_several_runs_are_a_list_that_leads_to_each(port: int) -> None:
    story, other = Story(3), invented_run("other")

    async def heartbeats() -> list[object]:
        return []

    empty = Source(other, heartbeats, lambda: None, story.source.signed, no_log="This node keeps no log.")  # type: ignore[arg-type]

    async def look(page: Page, url: str) -> None:
        await page.until("document.querySelectorAll('.runs li').length === 2")
        await page.until("document.querySelector('.runs').innerText.includes('3 peers')")
        await page.evaluate("document.querySelectorAll('.runs a')[1].click()")
        await page.until("document.querySelector('#log-empty').innerText === 'This node keeps no log.'")
        await page.until("!document.querySelector('#peers-empty').hidden")
        await page.evaluate("document.querySelector('.brand').click()")
        await page.until("!document.querySelector('#list').hidden && document.querySelector('#run').hidden")

    looking(port, [story.source, empty], look)
