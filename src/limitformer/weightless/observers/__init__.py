"""What a pass is looked at for: the stream, attention, experts."""
