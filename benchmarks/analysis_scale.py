"""How long the analysis of a large trace takes, and whether its sampler stays healthy.

    python benchmarks/analysis_scale.py --sites 1000 --recipes 6 --steps 50

Simulates such a trace, analyzes it in a process of its own, and prints one JSON object as the last
line: ``seconds`` (wall) and ``cpu_seconds`` of that process from its start, imports and compilation
included; ``peak_gib`` of its memory; ``max_rhat_hyper``, ``min_ess_hyper`` and ``divergences`` of
the fit; verdict counts.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path


def main() -> None:
    """Simulate, analyze, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--recipes", type=int, default=6)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="write the trace here and keep it")
    parser.add_argument("--out", type=Path, help="write the JSON object here too")
    parser.add_argument("--analyze", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.analyze is not None:
        print(json.dumps(measure(arguments.analyze, arguments.seed)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        trace = write(arguments.keep or Path(scratch) / "trace", arguments)
        command = [sys.executable, __file__, "--seed", str(arguments.seed), "--analyze", str(trace)]
        start = time.perf_counter()
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - start
    size = {name: getattr(arguments, name) for name in ("sites", "recipes", "steps", "seed")}
    result = {"seconds": round(seconds, 1), **json.loads(done.stdout.splitlines()[-1]), **size}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def write(path: Path, arguments: argparse.Namespace) -> Path:
    """Simulate the trace."""
    from simulated_trace import simulate

    start = time.perf_counter()
    simulate(
        path,
        sites=arguments.sites,
        recipes=arguments.recipes,
        steps=arguments.steps,
        seed=arguments.seed,
    )
    print(f"simulated {path} in {time.perf_counter() - start:.1f} s", flush=True)
    return path


def measure(trace: Path, seed: int) -> dict[str, object]:
    """Analyze a trace and return the figures."""
    from loka_toolkit.analysis import analyze

    safety = analyze(trace, seed=seed)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    health = safety.facts.health
    return {
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_gib": round(usage.ru_maxrss / 2**20, 2),
        "max_rhat_hyper": round(health.max_r_hat, 4),
        "min_ess_hyper": round(health.min_ess),
        "divergences": health.divergences,
        "min_bfmi": round(health.min_bfmi, 2),
        "healthy": health.healthy,
        "fit_seconds": round(health.seconds, 1),
        "verdicts": dict(Counter(cell.verdict.value for cell in safety.cells)),
        "false_discovery_rate": safety.facts.false_discovery_rate,
        "retried_because": safety.facts.config["retried_because"],
    }


if __name__ == "__main__":
    main()
