"""Linear layers on a CPU, multiplied by whatever reads their weights fastest."""

from gsm.linear.layers import fast_linears

__all__ = ["fast_linears"]
