"""Shared by the quantisers: products with weights that are unpacked piece by piece, and integer layouts."""
