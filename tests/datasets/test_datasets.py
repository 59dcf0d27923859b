from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from loka_toolkit.datasets.click_log import ClickLog, ClickLogSpec
from loka_toolkit.datasets.criteo import read_criteo
from loka_toolkit.errors import ArtifactCorruptError, ArtifactMissingError, ConfigurationError


def test_the_same_seed_gives_the_same_rows_and_another_seed_others():
    first, again, other = (
        ClickLog(seed=3).batch(100, 7),
        ClickLog(seed=3).batch(100, 7),
        ClickLog(seed=3).batch(100, 8),
    )
    for name in ("user_counts", "item_categories", "clicks"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    assert not np.array_equal(first.user_counts, other.user_counts)
    world = ClickLog(seed=4).batch(100, 7)
    assert not np.array_equal(first.probability, world.probability)


def test_clicks_follow_the_planted_probability():
    batch = ClickLog(seed=0).batch(50_000, 1)
    bins = np.quantile(batch.probability, np.linspace(0, 1, 11))
    which = np.clip(np.searchsorted(bins, batch.probability) - 1, 0, 9)
    for index in range(10):
        inside = which == index
        expected = batch.probability[inside].mean()
        error = np.sqrt(expected * (1 - expected) / inside.sum())
        # five standard errors: one false alarm in 170,000 runs of ten bins
        assert abs(batch.clicks[inside].mean() - expected) < 5 * error


def test_counts_are_heavy_tailed_and_categories_follow_zipf():
    spec = ClickLogSpec()
    batch = ClickLog(spec, seed=0).batch(50_000, 1)
    counts = batch.user_counts
    assert counts.min() == 0.0
    assert counts.max() > 1e5
    assert np.array_equal(counts, np.floor(counts))
    # Zeros are the blanks and, of the rest, the counts that round down to zero.
    small = (
        ClickLog(ClickLogSpec(blank_share=0.0), seed=0).batch(50_000, 1).user_counts == 0
    ).mean()
    expected = spec.blank_share + (1 - spec.blank_share) * small
    error = np.sqrt(expected * (1 - expected) / counts.size)
    assert abs((counts == 0).mean() - expected) < 5 * error
    frequency = np.bincount(batch.user_categories[:, 0], minlength=5000)[:50]
    slope = stats.linregress(np.log(np.arange(1, 51)), np.log(frequency)).slope
    assert slope == pytest.approx(-spec.zipf_exponent, abs=0.1)


@pytest.mark.parametrize(
    "bad",
    [
        {"user_counts": 0},
        {"user_cardinalities": ()},
        {"item_cardinalities": (1,)},
        {"blank_share": 1.0},
    ],
)
def test_senseless_specs_are_refused(bad):
    with pytest.raises(ConfigurationError):
        ClickLog(ClickLogSpec(**bad))


def test_criteo_rows_are_read_with_their_blanks(tmp_path):
    fields = ["1", "3", "", "-1", *["0"] * 10, "abc", "", *["x"] * 24]
    for name, text in {
        "a.csv": "label," + ",".join(f"c{i}" for i in range(39)) + "\n" + ",".join(fields) + "\n",
        "b.tsv": "\t".join(fields) + "\n",
    }.items():
        path = tmp_path / name
        path.write_text(text)
        rows = read_criteo(path)
        assert rows.labels.tolist() == [1.0]
        assert np.isnan(rows.dense[0, 1])
        assert rows.dense[0, [0, 2]].tolist() == [3.0, -1.0]
        assert rows.categories[0, :3].tolist() == ["abc", "", "x"]
        codes, sizes = rows.encoded_categories()
        assert codes.shape == (1, 26)
        assert sizes == (1,) * 26


def test_criteo_errors_name_the_line(tmp_path):
    with pytest.raises(ArtifactMissingError, match="no Criteo file"):
        read_criteo(tmp_path / "none")
    path = tmp_path / "x.csv"
    for content, words in {"1,2\n": "line 1 has 2 fields", "": "no rows"}.items():
        path.write_text(content)
        with pytest.raises(ArtifactCorruptError, match=words):
            read_criteo(path)
    path.write_text(",".join(["1", "x", *["0"] * 38]) + "\n")
    with pytest.raises(ArtifactCorruptError, match="line 1"):
        read_criteo(path)


def test_real_rows_are_read(shared_data):
    rows = read_criteo(shared_data / "criteo_sample_200.csv")
    assert rows.dense.shape == (200, 13)
    assert set(np.unique(rows.labels)) == {0.0, 1.0}
    assert np.nanmax(rows.dense) > 1e5
    assert len(read_criteo(shared_data / "criteo_sample_200.csv", limit=10).labels) == 10
