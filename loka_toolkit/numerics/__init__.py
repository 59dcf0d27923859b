"""Formats, scaling, casting, error metrics, conjugate posteriors, roofline: pure functions."""
