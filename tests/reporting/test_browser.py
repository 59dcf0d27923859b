"""The page in a real browser: headless Chromium, skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from loka_toolkit.reporting import write_report


@pytest.fixture(scope="module")
def address(tmp_path_factory, artifacts) -> str:
    path: Path = write_report(
        tmp_path_factory.mktemp("page") / "report.html",
        artifacts.safety,
        trace=artifacts.trace,
        replay=artifacts.replay,
        table=artifacts.table,
        top=3,
    )
    return path.as_uri()


@pytest.fixture
def visit(chromium, address):
    """Open the page in a context of its own; in the end nothing was requested, nothing failed."""
    contexts, requests, complaints = [], [], []

    def open_page(**options):
        context = chromium.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    # The icon is an empty data: address, which never leaves the browser.
    assert {url for url in requests if not url.startswith("data:")} == {address}
    assert complaints == []


def rows_shown(page, table: str):
    return page.eval_on_selector_all(
        f"#{table} tbody tr", "rows => rows.filter(r => r.offsetParent !== null).length"
    )


def column(page, table: str, index: int) -> list[str]:
    return page.eval_on_selector_all(
        f"#{table} tbody tr", f"rows => rows.map(r => r.cells[{index}].dataset.v ?? '')"
    )


def color_of_page(page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


LIGHT, DARK = "rgb(246, 247, 249)", "rgb(18, 21, 26)"


def test_sorting_by_a_number_both_ways(visit, artifacts):
    page = visit()
    button = page.locator("#cell-table thead button", has_text="P(exceed)")
    head = page.locator("#cell-table thead th", has_text="P(exceed)")
    button.click()
    values = [float(v) for v in column(page, "cell-table", 3)]
    assert values == sorted((c.p_exceed for c in artifacts.safety.cells), reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    button.click()
    values = [float(v) for v in column(page, "cell-table", 3)]
    assert values == sorted(values)
    assert head.get_attribute("aria-sort") == "ascending"
    page.locator("#cell-table thead button", has_text="Recipe").click()
    assert head.get_attribute("aria-sort") is None
    assert page.locator("#cell-table thead th[aria-sort]").count() == 1


def test_rows_without_a_number_stay_last(visit):
    page = visit()
    button = page.locator("#candidate-table thead button", has_text="latency")
    for _ in range(2):
        button.click()
        values = page.eval_on_selector_all(
            "#candidate-table tbody tr",
            "rows => rows.map(r => r.cells[r.cells.length-2].dataset.v)",
        )
        assert values[-1] == ""
        assert values[0] != ""


def test_sorting_works_from_the_keyboard(visit):
    page = visit()
    button = page.locator("#map-table thead button", has_text="FLOPs")
    button.focus()
    page.keyboard.press("Enter")
    values = [float(v) for v in column(page, "map-table", 1)]
    assert values == sorted(values, reverse=True)


def test_filters_combine_and_reset(visit, artifacts):
    page = visit()
    form = page.locator("form[data-for=cell-table]")
    form.get_by_label("Verdict").select_option("unsafe")
    unsafe = [c for c in artifacts.safety.cells if c.verdict == "unsafe"]
    assert rows_shown(page, "cell-table") == len(unsafe) > 0
    form.get_by_label("Role").select_option("dgrad")
    both = [c for c in unsafe if c.role == "dgrad"]
    assert rows_shown(page, "cell-table") == len(both) > 0
    form.get_by_label("Search").fill("E5M2/Tensor")
    found = [c for c in both if "e5m2/tensor" in c.recipe]
    assert rows_shown(page, "cell-table") == len(found) > 0
    total = len(artifacts.safety.cells)
    assert form.locator("output").inner_text() == f"{len(found)} of {total} rows"
    form.get_by_label("Search").fill("nothing is called so")
    assert rows_shown(page, "cell-table") == 0
    form.get_by_role("button", name="Show all").click()
    # Not wait_for_function: it polls with eval, which the page's content policy forbids.
    page.locator("#cell-table tbody tr[hidden]").first.wait_for(state="detached")
    assert rows_shown(page, "cell-table") == total


def test_the_other_table_is_left_alone(visit, artifacts):
    page = visit()
    page.locator("form[data-for=map-table]").get_by_label("Verdict").select_option("unsafe")
    assert rows_shown(page, "map-table") == 1
    assert rows_shown(page, "cell-table") == len(artifacts.safety.cells)


def test_a_link_to_a_hidden_row_brings_it_back(visit):
    page = visit()
    page.locator("form[data-for=cell-table]").get_by_label("Verdict").select_option("unsafe")
    link = page.locator("#map-table td.verdict a.safe").first
    target = link.get_attribute("href")
    assert page.locator(target).is_hidden()
    link.click()
    page.locator(target).wait_for(state="visible")


@pytest.mark.parametrize(("system", "first"), [("light", LIGHT), ("dark", DARK)])
def test_theme_follows_the_system_then_the_toggle_and_is_remembered(visit, system, first):
    page = visit(color_scheme=system)
    other = {LIGHT: DARK, DARK: LIGHT}[first]
    assert color_of_page(page) == first
    toggle = page.locator("#theme")
    label = toggle.inner_text()
    assert label == ("Dark theme" if first == LIGHT else "Light theme")
    toggle.click()
    assert color_of_page(page) == other
    assert toggle.inner_text() != label
    page.reload()
    assert color_of_page(page) == other
    toggle.click()
    page.reload()
    assert color_of_page(page) == first


def test_page_works_where_storage_is_forbidden(visit, chromium, address):
    context = chromium.new_context(color_scheme="light")
    context.add_init_script(
        "Object.defineProperty(window, 'localStorage', {get() { throw new Error('forbidden') }})"
    )
    errors = []
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    page.locator("#theme").click()
    assert color_of_page(page) == DARK
    page.locator("#map-table thead button", has_text="Site").click()
    assert errors == []
    context.close()
    visit()


def test_everything_reads_without_javascript(visit, artifacts):
    page = visit(java_script_enabled=False)
    assert page.locator("#cell-table tbody tr").count() == len(artifacts.safety.cells)
    for row in page.locator("#cell-table tbody tr").all()[
        :: max(1, len(artifacts.safety.cells) // 9)
    ]:
        assert row.is_visible()
    assert page.locator("#map-table tbody tr").last.is_visible()
    assert page.locator("tr[hidden]").count() == 0
    assert page.locator("form.toolbar").first.is_hidden()
    assert page.locator("#theme").is_hidden()
    assert page.locator("figure svg").first.is_visible()
    assert page.locator("button:visible").count() == 0


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_page_never_scrolls_sideways(visit, width):
    page = visit(viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_text_on_paper_is_dark_and_nothing_is_cut_off(visit):
    page = visit(color_scheme="dark", viewport={"width": 794, "height": 1123})
    page.locator("#theme").click()
    page.locator("#theme").click()
    assert color_of_page(page) == DARK
    page.emulate_media(media="print")
    assert color_of_page(page) == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(23, 27, 33)"
    assert page.locator("nav.sections").is_hidden()
    assert page.locator("form.toolbar").first.is_hidden()
    heights = page.eval_on_selector_all(
        ".scroll", "boxes => boxes.map(b => b.scrollHeight - b.clientHeight)"
    )
    assert max(heights) <= 1
    assert page.pdf().startswith(b"%PDF")


def test_collapsed_parts_open_for_printing_and_close_again(visit):
    page = visit()
    closed = page.locator("details:not([open])").count()
    assert closed > 0
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not([open])").count() == closed


def test_controls_are_reached_by_keyboard_in_order(visit):
    page = visit()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "theme"
    page.keyboard.press("Space")
    assert page.evaluate("document.documentElement.dataset.theme") in ("light", "dark")


def test_hostile_names_do_not_run(chromium, make_map, tmp_path):
    name = '<img src=x onerror="window.ran=1"><script>window.ran=1</script>\'"'
    safety = make_map(modules=((name, name, (64, 39, 117)),), alerts=(name,))
    path = write_report(tmp_path / "hostile.html", safety, title=name)
    context = chromium.new_context()
    page = context.new_page()
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    page.locator("#map-table thead button", has_text="Site").click()
    assert page.evaluate("window.ran") is None
    assert page.title() == name
    assert page.locator("h1").inner_text() == name
    assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]
    context.close()
