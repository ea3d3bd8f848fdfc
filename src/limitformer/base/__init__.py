"""Tools that every other folder may use: errors, memory, progress, locks, Ctrl-C, the pool of processes."""
