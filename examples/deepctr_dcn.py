"""A third-party model on Criteo rows: deepctr-torch's DCN, recorded and trained with a table.

    python examples/deepctr_dcn.py record --data rows.csv --out RUN
    loka analyze RUN --out safety.parquet
    loka replay RUN --out replay.parquet
    loka table build safety.parquet --replay replay.parquet --out table.json
    python examples/deepctr_dcn.py train --data rows.csv --table table.json --compare

Dense columns stay raw counts, blanks filled with 0, and categories are numbered. The library's own
``fit`` drives the training, with its summed loss and its regularizer; the recorder hangs on a hook
of the optimizer, so that no line of the library changes. Needs: pip install deepctr-torch==0.3.0
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from loka_toolkit.artifacts.dispatch_table import DispatchTable
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.datasets.criteo import CATEGORY_COLUMNS, DENSE_COLUMNS, read_criteo
from loka_toolkit.dispatch import install
from loka_toolkit.errors import LokaError
from loka_toolkit.recording import Schedule, record


@dataclasses.dataclass(frozen=True)
class Clicks:
    """Criteo rows as deepctr-torch wants them.

    Attributes:
        features: One array per column, by name.
        labels: 0 or 1.
        vocabulary: Number of categories per categorical column.
    """

    features: dict[str, np.ndarray]
    labels: np.ndarray
    vocabulary: dict[str, int]

    @classmethod
    def read(cls, path: Path) -> Clicks:
        """Read a Criteo file; blanks of dense columns become 0."""
        rows = read_criteo(path)
        index, sizes = rows.encoded_categories()
        dense = np.nan_to_num(rows.dense, nan=0.0)
        features = dict(zip(CATEGORY_COLUMNS, index.T, strict=True))
        features |= dict(zip(DENSE_COLUMNS, dense.T, strict=True))
        return cls(features, rows.labels, dict(zip(CATEGORY_COLUMNS, sizes, strict=True)))


def build_model(clicks: Clicks, seed: int) -> Any:
    """Return a compiled DCN."""
    with quiet():
        from deepctr_torch.inputs import DenseFeat, SparseFeat
        from deepctr_torch.models import DCN

        columns = [SparseFeat(n, size, embedding_dim=4) for n, size in clicks.vocabulary.items()]
        columns += [DenseFeat(name, 1) for name in DENSE_COLUMNS]
        model = DCN(columns, columns, task="binary", seed=seed)
        model.compile("adam", "binary_crossentropy")
    return model


def fit(model: Any, clicks: Clicks, options: argparse.Namespace, epochs: int) -> None:
    """Train with the library's own loop."""
    torch.manual_seed(options.seed)  # the order of the rows
    with quiet():
        model.fit(
            dict(clicks.features),
            clicks.labels,
            batch_size=options.batch_size,
            epochs=epochs,
            verbose=0,
        )


def log_losses(model: Any, clicks: Clicks) -> torch.Tensor:
    """Return the log loss of every row, float64, in the model's own precision."""
    with quiet():
        predicted = torch.from_numpy(model.predict(dict(clicks.features), batch_size=256))
    model.train()
    target = torch.from_numpy(clicks.labels).double()
    return functional.binary_cross_entropy(predicted.reshape(-1), target, reduction="none")


def run_record(options: argparse.Namespace) -> None:
    """Train under the recorder."""
    clicks = Clicks.read(options.data)
    model = build_model(clicks, options.seed)
    schedule = Schedule(warm_steps=options.warm_steps, every=options.every)
    with record(model, options.out, schedule=schedule, force=options.force) as recorder:
        hook = model.optim.register_step_post_hook(lambda *_: recorder.step())
        fit(model, clicks, options, options.epochs)
        hook.remove()
    trace = Trace.open(options.out)
    status = trace.manifest.status
    print(f"recorded {status.steps_recorded} of {status.steps_seen} steps in {options.out}")
    print(f"sites: {trace.sites.num_rows}, rows of errors: {trace.errors.num_rows}")
    for event in trace.manifest.events:
        print(f"{event.kind} ({event.count}x): {event.message}")


def run_train(options: argparse.Namespace) -> None:
    """Train with a dispatch table installed, and perhaps without it as well."""
    clicks = Clicks.read(options.data)
    table = DispatchTable.load(options.table)
    model = build_model(clicks, options.seed)
    with install(model, table, allow_unmeasured=options.allow_unmeasured) as installation:
        fit(model, clicks, options, options.epochs)
        with_table = log_losses(model, clicks)
        counts = installation.counts()
        routed = [site for site in installation.sites() if site.reason is None]
        by_role: dict[str, int] = {}
        for site in routed:
            by_role[site.role] = by_role.get(site.role, 0) + 1
        print(f"sites in FP8: {len(routed)} {by_role}")
        print(f"products in FP8: {counts.hits}")
        print(f"sites missed, by reason: {counts.sites_missed}")
        print(f"products missed at run time, by reason: {counts.misses}")
    print(f"log loss with the table: {with_table.mean():.6g}")
    if not options.compare:
        return
    plain = build_model(clicks, options.seed)
    fit(plain, clicks, options, options.epochs)
    without = log_losses(plain, clicks)
    difference = with_table - without
    error = float(difference.std()) / len(difference) ** 0.5
    verdict = "" if abs(float(difference.mean())) > 2 * error else " (not resolved)"
    print(f"log loss without:        {without.mean():.6g}")
    print(f"difference:              {difference.mean():+.3g} +- {error:.2g}{verdict}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the library's prints and its own deprecation warnings off the console."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def main() -> int:
    """Parse the command line and run a subcommand."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="train under the recorder")
    recording.add_argument("--out", type=Path, required=True, help="directory of the trace")
    recording.add_argument("--force", action="store_true", help="overwrite a trace")
    recording.add_argument("--warm-steps", type=int, default=20, help="steps recorded in a row")
    recording.add_argument("--every", type=int, default=5, help="then one of so many")
    training = commands.add_parser("train", help="train with a dispatch table")
    training.add_argument("--table", type=Path, required=True, help="the table, a JSON file")
    training.add_argument("--compare", action="store_true", help="train without it as well")
    training.add_argument(
        "--allow-unmeasured", action="store_true", help="use entries not measured on this chip"
    )
    for command in (recording, training):
        command.add_argument("--data", type=Path, required=True, help="Criteo rows, CSV or TSV")
        command.add_argument("--epochs", type=int, default=15, help="passes over the rows")
        command.add_argument("--batch-size", type=int, default=50, help="rows per step")
        command.add_argument("--seed", type=int, default=1024, help="of weights and row order")
    options = parser.parse_args()
    try:
        (run_record if options.command == "record" else run_train)(options)
    except ImportError as error:
        print(f"{error}; pip install deepctr-torch==0.3.0", file=sys.stderr)
        return 1
    except LokaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
