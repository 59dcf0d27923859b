from __future__ import annotations

import pytest

from loka_toolkit.errors import ArtifactMissingError, ConfigurationError, LokaError
from loka_toolkit.numerics.tolerance import REASONS, Tolerance
from loka_toolkit.settings import Settings, load_settings


def test_without_a_file_the_defaults_hold(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_settings(None) == Settings()
    with pytest.raises(ArtifactMissingError, match=r"none\.toml"):
        load_settings(tmp_path / "none.toml")


def test_what_the_file_says_is_used(tmp_path, monkeypatch):
    (tmp_path / "loka.toml").write_text(
        '[tolerance]\nsqnr_db = 25\n[sites]\ninclude = ["tower.*"]\n', encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    settings = load_settings(None)
    assert settings.tolerance == Tolerance(sqnr_db=25.0)
    assert settings.sites.include == ("tower.*",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[tolerance\n", "not valid TOML"),
        ("[tolerance]\nsqnr = 3\n", "sqnr"),
        ("[tolerances]\n", "tolerances"),
        ('[tolerance]\nsqnr_db = "x"\n', "sqnr_db"),
        ("[tolerance]\nsqnr_db = inf\n", r"sqnr_db = inf must lie in \[-50"),
        ("[tolerance]\nexceedance_rate = 0.0\n", "exceedance_rate"),
        ("[sites]\ninclude = 3\n", "include"),
    ],
)
def test_mistakes_are_named(tmp_path, content, words):
    path = tmp_path / "loka.toml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=words) as caught:
        load_settings(path)
    assert isinstance(caught.value, LokaError)


def test_every_criterion_has_a_reason_and_the_defaults_are_within_their_limits():
    Tolerance().validated()
    assert set(Tolerance.__struct_fields__) - set(REASONS) == {"horizon_steps"}
    assert all(len(reason) > 40 for reason in REASONS.values())
