"""Candidate kernels: the contract, one file per family or library, and the list of all of them."""
