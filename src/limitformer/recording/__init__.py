"""What kernels write down of their paths, and when paths end."""
