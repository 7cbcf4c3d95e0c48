"""Linear layers on a CPU by kernels of our own (``linear.cpp``): packing, and handing pointers over."""
