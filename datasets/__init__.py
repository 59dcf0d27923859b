"""Seeded generators of click data and readers for public data sets."""
