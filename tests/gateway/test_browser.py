"""The page in a real browser, wide and on a phone: every view works, nothing is cut off, and no error is logged."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.run import (
    RunAccepted,
    RunCompleted,
    RunEvaluated,
    RunExited,
    RunLog,
    RunPromoted,
    RunQueued,
    RunRejected,
    RunStarted,
)
from contracts.events.study import StudyAccepted, TrialEnded, TrialSuggested
from contracts.problems import FieldProblem
from contracts.spec.study import StudySpec
from contracts.spec.training import Evaluation, EvaluationTarget, Retention
from services.kit.bus import Bus
from tests.gateway.conftest import RUN, SPEC, Running, life, placed, progress, ref
from tests.lives import supported

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed: make browser")
if TYPE_CHECKING:
    from playwright.async_api import Page, Route

pytestmark = pytest.mark.needs("chromium")

#: The first of these that is installed is used, else the browser that playwright itself has downloaded.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
#: What makes an element stand over the edge of a phone without the whole page being wider.
HIDDEN_BUTTONS = """() => [...document.querySelectorAll("button, a, input, select")].filter((each) => {
    const box = each.getBoundingClientRect();
    return box.width && (box.right > innerWidth + 1 || box.left < -1);
}).map((each) => each.outerHTML)"""

TRAINED = SPEC.model_copy(
    update={
        "model": "digits",
        "params": {"lr": 0.01},
        "evaluation": Evaluation(metric="test/accuracy", mode="max"),
        "retention": Retention(metric="validation/accuracy", mode="max"),
    }
)
CHECKPOINT = ref(20)
MEASURED = SPEC.model_copy(
    update={
        "name": "evaluate digits",
        "kind": "evaluate",
        "evaluate": EvaluationTarget(run_id=RUN, checkpoint_uri=CHECKPOINT.uri),
    }
)
OTHER = SPEC.model_copy(update={"name": "other", "params": {"lr": 0.1}})
LOG = RunLog(run_id=RUN, generation=1, rank=0, offset=0, lines=("epoch 1 <b>loss</b> 0.5", "epoch 2 loss 0.4"))
REJECTION = FieldProblem(field="slotz", message="unknown field: did you mean slots?")
#: A promoted run with its evaluation, a run that goes on, and requests that were refused.
FACTS: list[Any] = [
    *life(spec=TRAINED)[:6],
    progress(1, range(1, 31)),
    LOG,
    CheckpointCommitted(
        run_id=RUN, generation=1, checkpoint=CHECKPOINT, size_bytes=1000, metrics={"validation/accuracy": 0.97}
    ),
    CheckpointCommitted(
        run_id=RUN, generation=1, checkpoint=ref(30), size_bytes=1000, metrics={"validation/accuracy": 0.9}
    ),
    RunExited(run_id=RUN, generation=1, node_id="n1", outcome="succeeded", step=30),
    RunExited(run_id=RUN, generation=1, node_id="n2", outcome="succeeded", step=30),
    RunCompleted(run_id=RUN, generation=1, checkpoint=ref(30), metrics={"validation/accuracy": 0.9}),
    RunAccepted(run_id="revaluate", spec=MEASURED, request_id="e2", request_source="test"),
    *supported(RunCompleted(run_id="revaluate", generation=1, metrics={"test/accuracy": 0.96})),
    RunEvaluated(run_id=RUN, evaluation_run_id="revaluate", metrics={"test/accuracy": 0.96}),
    RunPromoted(run_id=RUN, model="digits", version=1, reason="no champion yet"),
    RunAccepted(run_id="rother", spec=OTHER, request_id="e3", request_source="test"),
    RunQueued(run_id="rother", next_generation=1),
    placed(1, "n1", run_id="rother"),
    RunStarted(run_id="rother", generation=1, node_id="n1"),
    progress(1, range(1, 11), run_id="rother"),
    *(RunRejected(run_id=f"rbad{i}", name="typo", reason="invalid", problems=(REJECTION,)) for i in range(5)),
]


STUDY = StudySpec.model_validate(
    {
        "name": "sweep",
        "run": {"name": "sweep", "command": ["true"]},
        "space": {"lr": [0.1, 0.2]},
        "objectives": [{"metric": "validation/loss", "mode": "min"}],
        "trials": 60,
    }
)


async def publish_study(gateway: Running, bus: Bus) -> None:
    """Publish a study with 60 trials: all but the last six have ended, the last holds two slots, and #9 is the best."""
    await bus.publish(StudyAccepted(study_id="s1", spec=STUDY, request_id="s1", request_source="test"))
    for number in range(60):
        run_id, spec = f"rtrial{number}", SPEC.model_copy(update={"name": f"sweep #{number}", "study": "s1"})
        await bus.publish(TrialSuggested(study_id="s1", trial=number, run_id=run_id, params={"lr": 0.1}))
        await bus.publish(RunAccepted(run_id=run_id, spec=spec, request_id=run_id, request_source="test"))
        if number < 54:
            loss = 0.25 if number == 9 else 0.5
            await bus.publish(
                TrialEnded(study_id="s1", trial=number, run_id=run_id, outcome="completed", values=(loss,), metrics={})
            )
    await bus.publish(RunQueued(run_id="rtrial59", next_generation=1))
    await bus.publish(placed(1, "n2", run_id="rtrial59"))
    await gateway.client.get("/training-runs/none")


@asynccontextmanager
async def open_page(gateway: Running, viewport: dict[str, int]) -> AsyncIterator[Page]:
    """Yield the gateway's page in a browser; at its end nothing may have been logged as an error."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    async with playwright.async_playwright() as driver:
        is_there = found is not None or Path(driver.chromium.executable_path).exists()
        assert is_there, "there is no Chromium: apt-get install chromium, or .venv/bin/playwright install chromium"
        browser = await driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            page = await browser.new_page(viewport=viewport)
            page.set_default_timeout(60_000)
            errors: list[str] = []
            page.on("console", lambda line: errors.append(line.text) if line.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: errors.append(str(error)))
            playwright.expect.set_options(timeout=60_000)
            yield page
            assert errors == []
        finally:
            await browser.close()


def address(gateway: Running, place: str = "") -> str:
    return f"{gateway.client.base_url}/{place}"


async def publish_facts(gateway: Running, bus: Bus) -> None:
    for fact in FACTS:
        await bus.publish(fact)
    await gateway.client.get("/training-runs/none")  # waits until all of the above is in


async def listed_names(page: Page) -> list[str]:
    return await page.locator("#runs .name").all_inner_texts()


async def test_connecting_until_the_first_answer(gateway: Running) -> None:
    async with open_page(gateway, WIDE) as page:
        answer = asyncio.Event()

        async def hold_route(route: Route) -> None:
            await answer.wait()
            await route.continue_()

        await page.route("**/training-runs?*", hold_route)
        await page.goto(address(gateway))
        await page.get_by_text("Connecting to the gateway").wait_for()
        answer.set()
        await page.get_by_text("No runs yet").wait_for()


async def test_the_list_has_what_people_asked_for(gateway: Running, bus: Bus) -> None:
    await publish_facts(gateway, bus)
    async with open_page(gateway, WIDE) as page:
        await page.goto(address(gateway))
        await page.get_by_text("1 evaluation is not shown.").wait_for()
        assert await listed_names(page) == ["other", "digits"]
        await page.get_by_text("show evaluations").click()
        await page.locator("#runs .name", has_text="evaluate digits").wait_for()
        await page.get_by_text("hide evaluations").click()
        await page.get_by_text("show rejected requests").click()
        await page.locator("#runs .name", has_text="typo").first.wait_for()
        assert await listed_names(page) == ["typo"] * 5
        await page.locator("#chips .on").click()
        await page.locator("#q").fill("other")
        await playwright.expect(page.locator("#runs .name")).to_have_text(["other"])
        assert "q=other" in page.url


async def test_a_study_is_one_row_that_opens_its_trials(gateway: Running, bus: Bus) -> None:
    await publish_facts(gateway, bus)
    await publish_study(gateway, bus)
    async with open_page(gateway, WIDE) as page:
        await page.goto(address(gateway))
        row = page.locator("tr[data-study]")
        await row.wait_for()
        assert await listed_names(page) == ["sweep", "other", "digits"]
        text = " ".join((await row.inner_text()).split())
        for part in ("running", "54 / 60 trials", "54 completed, 6 running", "0.25 trial 9", "validation/loss"):
            assert part in text, (part, text)
        assert await row.locator(".slots i.got").count() == 2
        await row.locator(".name a").click()
        study = page.locator("#study")
        await study.get_by_text("54 completed, 6 running").wait_for()
        await playwright.expect(page.locator("#runs .name")).to_have_count(50)
        assert (await listed_names(page))[:2] == ["sweep #59", "sweep #58"]
        await page.get_by_text("older 50").click()
        await playwright.expect(page.locator("#runs .name")).to_have_count(10)
        assert (await listed_names(page))[-1] == "sweep #0"
        await page.get_by_text("newer 50").click()
        await playwright.expect(page.locator("#runs .name")).to_have_count(50)
        await study.get_by_text("trial 9").click()
        await page.locator("#detail h2", has_text="sweep #9").wait_for()
        await study.get_by_text("all runs").click()
        await row.wait_for()
        await page.go_back()
        await study.get_by_text("54 completed, 6 running").wait_for()


async def test_a_study_without_trials_is_listed(gateway: Running, bus: Bus) -> None:
    await bus.publish(StudyAccepted(study_id="s1", spec=STUDY, request_id="s1", request_source="test"))
    async with open_page(gateway, WIDE) as page:
        await page.goto(address(gateway))
        await page.locator("tr[data-study] .name a").click()
        await page.locator("#study", has_text="0 / 60 trials").wait_for()
        await page.get_by_text("No run matches.").wait_for()


async def test_the_views_of_a_run(gateway: Running, bus: Bus) -> None:
    await publish_facts(gateway, bus)
    async with open_page(gateway, WIDE) as page:
        await page.goto(address(gateway))
        await page.locator("#runs .name a", has_text="digits").click()
        await page.locator("#detail h2", has_text="digits").wait_for()
        detail = page.locator("#detail")
        assert "best: step 20 (validation/accuracy 0.97), last: step 30" in await detail.inner_text()
        await detail.get_by_text("parameters").click()
        await detail.get_by_text("params.lr").wait_for()
        await detail.locator(".tabs").get_by_text("files").click()
        best = detail.locator("tr", has=page.locator(".best"))
        await best.wait_for()
        assert (await best.inner_text()).split()[:2] == ["20", "best"]
        await detail.get_by_text("logs").click()
        await page.get_by_text("epoch 1 <b>loss</b> 0.5").wait_for()
        await page.get_by_placeholder("Lines that contain").fill("epoch 2")
        await playwright.expect(page.locator("#output")).to_have_text("epoch 2 loss 0.4")
        await detail.get_by_text("overview").click()
        await detail.get_by_role("link", name="revaluate").click()
        await detail.get_by_role("link", name=RUN).wait_for()  # the evaluation leads back to its run


async def test_who_chooses_a_run_before_the_page_does_sees_it(gateway: Running, bus: Bus) -> None:
    await publish_facts(gateway, bus)
    async with open_page(gateway, WIDE) as page:
        # The moment between a click and the event that tells the page of it, for as long as the page needs.
        await page.add_init_script("addEventListener('hashchange', (event) => event.stopImmediatePropagation())")
        chosen = asyncio.Event()

        async def hold_route(route: Route) -> None:
            await chosen.wait()
            await route.continue_()

        await page.route("**/curves?*", hold_route)
        await page.goto(address(gateway))
        await page.locator("#runs .name a", has_text="digits").click()
        chosen.set()
        await page.locator("#runs tr", has_text="other").locator(".curve-cell path").first.wait_for()
        assert page.url.endswith(f"#{RUN}")


async def test_runs_are_compared(gateway: Running, bus: Bus) -> None:
    await publish_facts(gateway, bus)
    async with open_page(gateway, WIDE) as page:
        await page.goto(address(gateway))
        for name in ("other", "digits"):
            await page.get_by_label(f"compare {name}").check()
        await page.locator("#compare").click()
        await page.get_by_text("2 runs compared").wait_for()
        row = page.locator("#detail tr", has_text="params.lr")
        assert (await row.inner_text()).split() == ["params.lr", "0.1", "0.01"]
        assert await page.locator("#detail .chart .curve").count() == 2


async def test_a_phone_shows_all_of_it(gateway: Running, bus: Bus) -> None:
    await publish_facts(gateway, bus)
    await publish_study(gateway, bus)
    places = {
        "": "tr[data-study] .name",
        "?study=s1": "#study a",
        f"#{RUN}": "#timeline li",
        f"#{RUN}/parameters": "#body td",
        f"#{RUN}/files": "#body td.best",
        f"#{RUN}/logs": "#output",
        f"#compare/{RUN},rother": "#detail .compared td",
    }
    async with open_page(gateway, PHONE) as page:
        for place, shown in places.items():
            await page.goto("about:blank")
            await page.goto(address(gateway, place))
            await page.locator(shown).first.wait_for()
            assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], place
            assert await page.evaluate(HIDDEN_BUTTONS) == [], place
