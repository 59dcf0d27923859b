"""Stage 2: where is FP8 safe? Analyze a trace and write the report.

python examples/2_analyze.py --run RUN --out safety.parquet --report report.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

import loka_toolkit as loka


def main() -> None:
    """Analyze, print the sites, write the map and the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="directory of the trace")
    parser.add_argument("--out", type=Path, required=True, help="the safety map")
    parser.add_argument("--report", type=Path, required=True, help="the HTML report")
    options = parser.parse_args()

    safety = loka.analyze(options.run, tolerance=loka.Tolerance(sqnr_db=20.0))
    safety.save(options.out)
    for site in safety.site_verdicts():
        print(f"{site.verdict.symbol} {site.site:12} {site.recipe or '-':28} {site.reason}")
    frame = safety.to_frame()
    print(frame.groupby("recipe")["verdict"].value_counts().unstack(fill_value=0))
    loka.write_report(options.report, safety, trace=options.run)


if __name__ == "__main__":
    main()
