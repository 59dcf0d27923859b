"""Find out where FP8 is safe in a recommendation model and where it pays."""

from loka_toolkit._version import __version__

__all__ = ["__version__"]
