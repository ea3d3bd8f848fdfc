"""What all tests share."""

import signal

# A shell switches Ctrl-C off for what runs in the background; tests send it, and what they start must hear it.
signal.signal(signal.SIGINT, signal.default_int_handler)
