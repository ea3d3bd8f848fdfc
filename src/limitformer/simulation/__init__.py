"""The public calls `simulate` and `limit`, and their options."""
