"""Linear layers on a CPU by C++ kernels, for unquantised weights and every packed format: packing, products, rows."""
