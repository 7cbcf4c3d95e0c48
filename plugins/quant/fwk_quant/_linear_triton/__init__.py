"""Products with packed matrices by kernels of our own in Triton, which unpack numbers as they multiply them."""
