"""What every floor may use: errors, memory, progress, locks."""
