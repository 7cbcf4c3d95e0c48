"""What ``fwk plugins new`` starts from: a small, complete plugin of every family, in a package ``fwk_mine``."""
