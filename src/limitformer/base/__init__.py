"""What every floor may use: errors, memory, progress, locks, Ctrl-C, the pool of processes."""
