"""Compiled kernels that know no Transformer: lanes, random streams, elementary functions, factors."""
