from __future__ import annotations

import html.parser
import re
import sys

import msgspec
import pytest

from loka_toolkit.artifacts.map_facts import Coverage
from loka_toolkit.artifacts.safety_map import SafetyMap
from loka_toolkit.errors import (
    ArtifactCorruptError,
    ArtifactExistsError,
    ArtifactMissingError,
    ConfigurationError,
    MissingDependencyError,
)
from loka_toolkit.reporting import report, write_report

VOID = {"meta", "link", "input", "br", "wbr", "img", "hr"}
HOSTILE = (
    '<script>alert("1")</script>',
    "\"><img src=http://evil.example/x onerror=alert(1)>'",
    "{{ 7 * 7 }}{% raw %}",
    "</style></title><svg onload=alert(2)>",
    "javascript:alert(3)",
    "層.тест.🦉.\u202egnp.exe",
    "$\\frac{1}{0}$ & %s %(x)s",
    "a" * 5000,
    "line\nbreak\ttab \x00 nul",
)


class Page(html.parser.HTMLParser):
    """A strict reader: every element is closed in order; attributes and texts are kept."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> repeats an attribute"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    @property
    def visible(self) -> str:
        return "".join(text for tag, text in self.texts if tag not in ("script", "style"))

    def attributes(self, name: str) -> list[str]:
        return [a[name] or "" for _, a in self.elements if name in a]


@pytest.fixture(scope="module")
def full(artifacts) -> str:
    return report(
        artifacts.safety,
        trace=artifacts.trace,
        replay=artifacts.replay,
        table=artifacts.table,
        top=3,
    )


@pytest.fixture(scope="module")
def page(full) -> Page:
    return Page(full)


def test_page_is_well_formed_and_its_identifiers_are_unique(page):
    assert page.open == []
    identifiers = page.attributes("id")
    assert len(identifiers) == len(set(identifiers))
    assert [tag for tag, _ in page.elements].count("h1") == 1
    assert dict(page.elements[0][1]) == {"lang": "en"}


def test_every_inner_reference_leads_somewhere(page):
    identifiers = set(page.attributes("id"))
    targets = [h[1:] for h in page.attributes("href") if h.startswith("#")]
    assert set(targets) <= identifiers
    assert targets


def test_nothing_is_loaded_from_anywhere(full, page):
    assert "http:" not in full
    assert "https:" not in full
    assert page.attributes("src") == []
    assert page.attributes("srcset") == []
    assert {h for h in page.attributes("href") if not h.startswith("#")} == {"data:,"}
    style = "".join(text for tag, text in page.texts if tag == "style")
    assert "@import" not in style
    assert "url(" not in style
    policy = next(a["content"] for t, a in page.elements if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert not [name for _, a in page.elements for name in a if name.startswith("on")]


def test_theme_is_chosen_before_anything_is_painted(full):
    assert full.index("loka-theme") < full.index("<style>") < full.index("<body>")


def test_every_section_and_every_cell_is_there(artifacts, page):
    identifiers = set(page.attributes("id"))
    sections = {"alerts", "overview", "map", "cells", "sites", "trust", "tolerance", "scales"}
    assert sections | {"norms", "replay", "table", "provenance", "glossary"} <= identifiers
    for index, cell in enumerate(artifacts.safety.cells):
        assert f"cell-{index}" in identifiers
        assert cell.reason in page.visible
    assert artifacts.safety.facts.trace_digest in page.visible


def test_images_and_controls_have_names(page):
    for tag, attributes in page.elements:
        if tag == "svg":
            assert attributes["role"] == "img"
            assert len(attributes["aria-label"]) > 20
        if attributes.get("role") == "region":
            assert attributes["aria-label"]
            assert attributes["tabindex"] == "0"
    labels = [tag for tag, _ in page.elements].count("label")
    controls = [tag for tag, _ in page.elements if tag in ("input", "select")]
    assert labels == len(controls) > 0


def test_verdicts_are_written_and_marked_not_only_coloured(page):
    for word in ("✓ safe", "✗ unsafe", "? insufficient-evidence"):
        assert word in page.visible


def test_same_artifacts_give_the_same_bytes(artifacts, full):
    again = report(
        artifacts.safety,
        trace=artifacts.trace,
        replay=artifacts.replay,
        table=artifacts.table,
        top=3,
    )
    assert again == full


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_text_and_nothing_else(
    name, tmp_path, make_map, make_trace, make_replay, make_table
):
    modules = ((name, name, (64, 39, 117)), ("head", "Linear", (64, 1, 13)))
    safety = make_map(
        modules=modules,
        alerts=(name,),
        coverage=Coverage(9e9, 1e9, {name: 1e9}, 2, 0),
        config={name: name},
        tolerance_reasons={"sqnr_db": name},
    )
    cells = tuple(msgspec.structs.replace(c, reason=name) for c in safety.cells)
    odd = msgspec.structs.replace(
        cells[0], role=name, site=f"{name}#9:{name}", recipe=name, binding_criterion=name,
        underflow_worst_group=name, impact_reason=name, dtype=name,
    )  # fmt: skip
    safety = SafetyMap((*cells, odd), safety.facts)
    trace = make_trace(tmp_path / "trace", SafetyMap(cells, safety.facts), steps=(1, 2))
    replay = make_replay(safety, policy=name, policy_description=name)
    table = make_table(SafetyMap(cells, safety.facts), chip=name)
    text = report(safety, trace=trace, replay=replay, table=table, title=name, top=2)
    page = Page(text)
    tags = {tag for tag, _ in page.elements}
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert "img" not in tags
    assert not [a for _, attributes in page.elements for a in attributes if a.startswith("on")]
    assert {h for h in page.attributes("href") if not h.startswith("#")} == {"data:,"}
    assert page.attributes("src") == []
    assert "49" not in re.findall(r"<h1>(.*?)</h1>", text, re.DOTALL)[0]
    shown = name.replace("\x00", "\ufffd")
    heading = page.visible.replace("\x00", "\ufffd")
    assert shown[:100] in heading


def test_long_names_are_cut_in_sight_and_kept_in_the_title(make_map):
    name = "block." * 60 + "end"
    page = Page(report(make_map(modules=((name, "Linear", (64, 39, 117)),))))
    assert f"{name}#0:fwd" in page.attributes("title")
    assert max(len(text) for tag, text in page.texts if tag == "span") < 200


def test_size_stays_moderate(make_map):
    modules = tuple(
        (f"tower.{i // 8}.block.{i % 8}", "Linear", (8192, 512, 512)) for i in range(67)
    )
    text = report(make_map(modules=modules))
    assert len(text.encode()) < 5_000_000 * 201 / 200
    per_cell = len(text.encode()) / len(make_map(modules=modules).cells)
    assert per_cell < 3_000


def test_paths_and_values_say_the_same(tmp_path, artifacts):
    safety = artifacts.safety.save(tmp_path / "safety.parquet")
    replay = artifacts.replay.save(tmp_path / "replay.parquet")
    table = artifacts.table.save(tmp_path / "table.json")
    text = report(safety, trace=str(artifacts.trace.path), replay=replay, table=str(table), top=1)
    page = Page(text)
    for path in (safety, replay, table, artifacts.trace.path):
        assert str(path) in page.visible
    assert "built from another safety map" in page.visible  # the table names a made-up digest


def test_written_file_holds_the_page_and_is_not_overwritten(tmp_path, artifacts):
    path = write_report(tmp_path / "new" / "report.html", artifacts.safety)
    assert path.read_text(encoding="utf-8") == report(artifacts.safety)
    path.write_text("mine")
    with pytest.raises(ArtifactExistsError, match="--force"):
        write_report(path, artifacts.safety)
    assert path.read_text() == "mine"
    write_report(str(path), artifacts.safety, force=True, title="Second")
    assert "<title>Second</title>" in path.read_text(encoding="utf-8")
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_unusable_artifacts_are_named(tmp_path, artifacts):
    with pytest.raises(ArtifactMissingError, match=r"no\.parquet"):
        report(tmp_path / "no.parquet")
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"PAR1 not really")
    with pytest.raises(ArtifactCorruptError, match=r"bad\.parquet"):
        report(bad)
    with pytest.raises(ArtifactMissingError, match="nowhere"):
        report(artifacts.safety, trace=tmp_path / "nowhere")
    with pytest.raises(ConfigurationError):
        report(artifacts.safety, top=-3)


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(package, monkeypatch, artifacts):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=rf"needs {package};.*loka-toolkit\[analyze\]"):
        report(artifacts.safety)
