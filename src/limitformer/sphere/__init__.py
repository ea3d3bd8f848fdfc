"""Tokens on the unit sphere: the kernels that chains and limits of [CT] share."""
