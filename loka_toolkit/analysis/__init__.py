"""From a trace to a safety map: observations, the Bayesian fit, verdicts and their reasons."""

from loka_toolkit.analysis.run import analyze

__all__ = ["analyze"]
