"""The seams of fwk: one file per family, each with its declaration and its interface. Imports no torch."""
