"""What a command returns: `report` saves it, `verdict` is a statement, `page` and `figures` are its HTML."""
